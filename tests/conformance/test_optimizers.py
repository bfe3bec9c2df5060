"""What every registered optimizer promises, alone and in a whole run."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, quantize
from quark_onnx.api import Result
from quark_onnx.cli import main
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import OPTIMIZERS
from quark_onnx.config import to_dict
from quark_onnx.config.qconfig import parse_optimizer
from quark_onnx.kernels.levels import Levels
from quark_onnx.optimizers.problem import RoundingProblem, SampledRows, Solution
from quark_onnx.patterns.activation import Activation
from tests.cases import loop_over
from tests.models import (
    MODELS,
    Feeds,
    canonical,
    inferred,
    interface,
    normal,
    parse,
    run,
    samples,
    weight,
)
from tests.quark_onnx.optimizers.networks import NETWORKS

#: Settings under which an optimizer takes less time.
QUICK: dict[str, Any] = {"iterations": 15}
ODD = (
    "biased",
    "depthwise",
    "shared_weight",
    "tied",
    "branches",
    "inner_output",
    "nameless",
)
SETTINGS = [
    (name, field.name)
    for name in OPTIMIZERS
    for field in dataclasses.fields(OPTIMIZERS[name])
]


def biased() -> ModelProto:
    """Two layers with biases that a Relu always lets pass."""
    return parse(
        """g (float[N,3,8,8] x) => (float[N,4,6,6] y) {
            [first] a = Conv (x, k, b)
            [relu] r = Relu (a)
            [second] y = Conv (r, l)
        }""",
        k=normal(6, 3, 1, 1, scale=0.1),
        b=np.float32([5, 40, 0, -3, 9, 0]),
        l=weight(4, 6, 3, 3),
    )


def of_stage(stage: str) -> list[str]:
    return [name for name in OPTIMIZERS if OPTIMIZERS[name].stage == stage]


every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
float_optimizer = pytest.mark.parametrize("name", of_stage("float"))
layer_optimizer = pytest.mark.parametrize("name", of_stage("layer"))
every_network = loop_over("network", {name: name for name in (*NETWORKS, *ODD)})


def made(name: str) -> Any:
    cls = OPTIMIZERS[name]
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in QUICK.items() if key in names})


@cache
def network_of(network: str) -> tuple[ModelProto, list[Feeds]]:
    if network in NETWORKS:
        make, data = NETWORKS[network]
        return make(), data()
    model = biased() if network == "biased" else MODELS[network]()
    return model, samples(model, 8)


@cache
def quantized(name: str, network: str) -> Result:
    """The result of a run with an optimizer, or without any."""
    model, data = network_of(network)
    optimizers = (made(name),) if name else ()
    return quantize(model, data, QConfig.of("A8W8").with_(optimizers=optimizers))


# Settings


@every_optimizer
def test_it_is_a_frozen_value_with_a_name_and_a_stage(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    assert (optimizer.name, optimizer.stage in ("float", "layer", "plan")) == (
        name,
        True,
    )
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer
    assert optimizer == dataclasses.replace(optimizer)
    for field in dataclasses.fields(optimizer):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(optimizer, field.name, getattr(optimizer, field.name))


@every_optimizer
def test_every_setting_is_documented(name: str) -> None:
    text = inspect.getdoc(OPTIMIZERS[name]) or ""
    assert text.partition("\n")[0].endswith(".")
    for field in dataclasses.fields(OPTIMIZERS[name]):
        assert f"{field.name}: " in text.partition("Attributes:")[2], field.name


@every_optimizer
def test_a_configuration_names_it_and_comes_back(name: str) -> None:
    config = QConfig.of({"preset": "A8W8", "optimizers": [name.upper()]})
    assert config.optimizers == (OPTIMIZERS[name](),)
    assert QConfig.of(json.loads(json.dumps(to_dict(config)))) == config


@loop_over(("name", "setting"), SETTINGS)
def test_a_value_of_a_wrong_type_is_refused(name: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{setting}\b.* of .*{name}"):
        OPTIMIZERS[name](**{setting: object()})


@every_optimizer
def test_an_unknown_setting_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="has no setting 'no_such'"):
        parse_optimizer(f"{name}:no_such=1")


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "optimizers", "--json"]) == 0
    listed = {
        row["name"]: row for row in json.loads(capsys.readouterr().out)["optimizers"]
    }
    assert listed.keys() == set(OPTIMIZERS)
    for name, row in listed.items():
        fields = dataclasses.fields(OPTIMIZERS[name])
        assert set(row["settings"]) == {field.name for field in fields}


# The float graph


@every_network
@float_optimizer
def test_the_float_function_is_kept(name: str, network: str) -> None:
    model, data = network_of(network)
    before, arrays = canonical(model), pickle.dumps(data)
    graph = inferred(model)
    optimizer = made(name)
    count = optimizer(graph, data)
    graph.drop_unused()
    after = graph.to_model()
    assert canonical(model) == before and pickle.dumps(data) == arrays
    assert isinstance(count, int)
    if not count:
        assert canonical(after) == canonical(inferred(model).to_model())
        return
    onnx.checker.check_model(after, full_check=True)
    assert interface(after) == interface(model)
    for feeds in data[:2] if optimizer.exact else []:
        for expected, found in zip(run(model, feeds), run(after, feeds), strict=True):
            atol = 1e-4 * max(1.0, np.abs(expected).max(initial=0))
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=atol)


@float_optimizer
def test_a_network_has_what_it_looks_for(name: str) -> None:
    counts = []
    for network in (*NETWORKS, *ODD):
        model, data = network_of(network)
        counts.append(made(name)(inferred(model), data))
    assert any(counts)


@every_network
@float_optimizer
def test_the_float_graph_is_rewritten_the_same_way_again(
    name: str, network: str
) -> None:
    model, data = network_of(network)
    found = set[bytes]()
    for _ in range(2):
        graph = inferred(model)
        made(name)(graph, data)
        found.add(canonical(graph.to_model()))
    assert len(found) == 1


@float_optimizer
def test_a_float_graph_without_samples(name: str) -> None:
    model, _ = network_of("attentive")
    graph = inferred(model)
    optimizer = made(name)
    count = optimizer(graph, ())
    if optimizer.needs_data:
        assert count == 0
        assert canonical(graph.to_model()) == canonical(inferred(model).to_model())


# Layers


def problem_of() -> RoundingProblem:
    """A layer with four outputs on integer levels, whose inputs are correlated."""
    random = np.random.default_rng(3)
    weight = random.normal(size=(1, 4, 24))
    common = random.normal(size=(1, 600, 1))
    inputs = np.float32(random.normal(size=(1, 600, 24)) + common)
    targets = np.float32(inputs @ weight[0].T)
    scale = np.full(weight.shape, np.abs(weight).max() / 7, np.float32)
    ends = [np.full(weight.shape, code, np.float32) for code in (-8, 7)]
    train = SampledRows(inputs[:, :480], targets[:, :480])
    double = train.inputs.astype(np.float64)
    hessian = np.einsum("grk,grl->gkl", double, double)
    return RoundingProblem(
        name="layer",
        weight=weight,
        bias=np.zeros((1, 4)),
        lattice=Levels(scale, np.zeros(0, np.float32), *ends),
        biased=True,
        activation=Activation(),
        train=train,
        held=SampledRows(inputs[:, 480:], targets[:, 480:]),
        mean=lambda: inputs.mean(axis=1, dtype=np.float64),
        gram=lambda: (hessian, len(train)),
    )


@layer_optimizer
def test_a_proposal_has_levels_of_the_layer_and_is_deterministic(name: str) -> None:
    problem = problem_of()
    present = problem.nearest()
    kept = pickle.dumps((present, problem.weight, problem.train))
    first, second = (made(name)(problem, present) for _ in range(2))
    assert pickle.dumps((present, problem.weight, problem.train)) == kept
    assert isinstance(first, Solution)
    assert first.weight.dtype == first.bias.dtype == np.float32
    codes = first.weight / problem.lattice.scale
    np.testing.assert_allclose(codes, np.rint(codes), atol=1e-4)
    assert codes.min() >= -8 and codes.max() <= 7
    np.testing.assert_array_equal(first.weight, second.weight)
    np.testing.assert_array_equal(first.bias, second.bias)
    assert np.isfinite(problem.loss(problem.allowed(first))).all()


# Whole runs


@loop_over("network", {name: name for name in NETWORKS})
@every_optimizer
def test_a_run_keeps_what_helps_and_reports_it(name: str, network: str) -> None:
    model, data = network_of(network)
    before, arrays = canonical(model), pickle.dumps(data)
    result = quantized(name, network)
    assert canonical(model) == before and pickle.dumps(data) == arrays
    onnx.checker.check_model(result.model, full_check=True)
    assert interface(result.model) == interface(model)
    assert all(layer.after <= layer.before for layer in result.report.layers)
    assert name in result.report.config
    if OPTIMIZERS[name].stage == "plan":
        plain = quantized("", network).report
        assert result.report.worst_sqnr >= plain.worst_sqnr
    elif OPTIMIZERS[name].stage == "layer":
        assert any(name in layer.changed for layer in result.report.layers)
    else:
        assert any(name in note for note in result.report.notes), result.report.notes


@every_optimizer
def test_the_next_run_is_the_same(name: str) -> None:
    model, data = network_of("convolutional")
    config = QConfig.of("A8W8").with_(optimizers=(made(name),))
    again = quantize(model, data, config)
    assert canonical(again.model) == canonical(quantized(name, "convolutional").model)
