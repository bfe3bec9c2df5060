"""What every registered algorithm for language models promises."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import pickle
from functools import cache
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from quark_onnx.cli import main
from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.common.registry import ALGORITHMS
from quark_onnx.torch.algorithms.base import BlockJob, Outcome
from quark_onnx.torch.algorithms.memory import Shapes, memory_of
from quark_onnx.torch.config.algorithm_names import ALGORITHM_SETTINGS
from quark_onnx.torch.config.algorithm_order import STAGES, algorithm
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.quantized_tensor import Quantized, quantize
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.cases import loop_over
from tests.quark_onnx.torch.algorithms.blocks import change, job_of, model_of
from tests.torch_models import llama, logits, made, tokens

#: Settings under which an algorithm takes less time.
QUICK: dict[str, Any] = {"steps": 4, "iterations": 4, "sequences": 4, "batch": 2}
SPECS = {
    "int4": scheme("int4_wo_32"),
    "uint4": scheme("uint4_wo_32"),
    "int8": scheme("int8"),
    "mxfp4": scheme("mxfp4_weight_only"),
}
SETTINGS = [
    (name, field.name)
    for name in ALGORITHMS
    for field in dataclasses.fields(ALGORITHMS[name])
]
#: The layers that read one tensor have factors in common.
COMMON = {f"{side}_proj": "attention" for side in "qkv"}
COMMON |= {"gate_proj": "mlp", "up_proj": "mlp"}
#: The sizes of a small model, and of one of twice the width.
SMALL, WIDE = (
    Shapes(
        layers={f"0.{place}": (width, width) for place in range(4)},
        block=16 * width**2,
        itemsize=4,
        tokens=4096,
        samples=8,
    )
    for width in (128, 256)
)


def of_stage(stage: str) -> list[str]:
    return [name for name in ALGORITHMS if ALGORITHMS[name].stage == stage]


RESCALING = of_stage("block")
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
block_algorithm = pytest.mark.parametrize("name", RESCALING)
rounder = pytest.mark.parametrize("name", of_stage("weights"))
every_spec = loop_over("spec", SPECS)


def quick(name: str) -> Any:
    cls = ALGORITHMS[name]
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in QUICK.items() if key in names})


def job_with(spec: Any) -> BlockJob:
    """The last block of a small model, with calls of its own."""
    job = job_of(model_of("llama3"), spec)
    with torch.no_grad():
        job.targets = [call.run(job.block) for call in job.floats]
    return job


def rounded(job: BlockJob) -> dict[str, Quantized]:
    """The codes of round to nearest."""
    codes = {}
    for name, weight, spec in job.weights():
        assert spec.weight is not None
        codes[name] = quantize(weight, spec.weight, name)
    return codes


def parts(quantized: Quantized) -> list[bytes]:
    tensors = (quantized.codes, quantized.scale, quantized.zero, quantized.whole)
    return [b"" if each is None else raw(each) for each in tensors]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def check_no_worse(outcomes: list[Outcome]) -> None:
    """No error grows; a factor of layers that read one tensor lowers the sum of their errors, and
    so that of one of them.
    """
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        errors = (outcome.before, outcome.after)
        assert all(math.isfinite(error) and error >= 0 for error in errors), outcome
        parent, _, layer = outcome.layer.rpartition(".")
        together = COMMON.get(layer, layer) if outcome.algorithm in RESCALING else layer
        groups.setdefault((parent, together), []).append(outcome)
    for group in groups.values():
        assert any(each.after <= each.before * (1 + 1e-6) for each in group), group


# Settings


@every_algorithm
def test_the_command_line_knows_its_settings(name: str) -> None:
    settings = {field.name for field in dataclasses.fields(ALGORITHMS[name])}
    assert set(ALGORITHM_SETTINGS[name]) == settings


@every_algorithm
def test_it_is_a_frozen_value_with_a_stage(name: str) -> None:
    value = ALGORITHMS[name]()
    assert value.stage in STAGES
    assert type(value.needs_data) is bool
    assert ALGORITHMS[value.name] is type(value)
    assert pickle.loads(pickle.dumps(value)) == value == dataclasses.replace(value)
    assert hash(pickle.loads(pickle.dumps(value))) == hash(value)
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, getattr(value, field.name))


@every_algorithm
def test_every_setting_is_documented(name: str) -> None:
    text = inspect.getdoc(ALGORITHMS[name]) or ""
    assert text.partition("\n")[0].endswith(".")
    bases = [inspect.getdoc(each) or "" for each in ALGORITHMS[name].__mro__]
    for field in dataclasses.fields(ALGORITHMS[name]):
        assert any(f"{field.name}: " in base for base in bases), field.name


@loop_over(("name", "setting"), SETTINGS)
def test_a_value_of_a_wrong_type_is_refused(name: str, setting: str) -> None:
    own = ALGORITHMS[name].name
    with pytest.raises(ConfigError, match=rf"^{setting}\b.* of .*{own}"):
        ALGORITHMS[name](**{setting: object()})


@every_algorithm
def test_an_unknown_setting_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="has no setting 'no_such'"):
        algorithm(f"{name}:no_such=1")


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "algorithms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["algorithms"]
    listed = {row["name"]: set(row["settings"]) for row in rows}
    for name in ALGORITHMS:
        assert listed[name] == {f.name for f in dataclasses.fields(ALGORITHMS[name])}


# Memory


@every_algorithm
def test_it_reports_memory_that_grows_with_the_model(name: str) -> None:
    small, unknown = memory_of([ALGORITHMS[name]()], SMALL)
    wide, _ = memory_of([ALGORITHMS[name]()], WIDE)
    assert unknown == ()
    assert 0 < small < wide


# Blocks


@every_spec
@block_algorithm
def test_a_block_computes_what_it_did(name: str, spec: Any) -> None:
    job = job_with(spec)
    outcomes: list[Outcome] = []
    assert change(job, lambda: outcomes.extend(quick(name)(job))) < 1e-4
    check_no_worse(outcomes)


@every_spec
@rounder
def test_codes_are_no_worse_and_the_block_is_untouched(name: str, spec: Any) -> None:
    job = job_with(spec)
    start = rounded(job)
    before = {key: parts(each) for key, each in start.items()}
    state = {key: raw(tensor) for key, tensor in job.block.state_dict().items()}
    codes, outcomes = quick(name)(job, start)
    assert {key: parts(each) for key, each in start.items()} == before
    assert {key: raw(each) for key, each in job.block.state_dict().items()} == state
    assert codes.keys() == start.keys()
    for key, found in codes.items():
        assert found.spec == start[key].spec and found.shape == start[key].shape
        assert found.codes.dtype == start[key].codes.dtype
        assert torch.isfinite(found.dequantize()).all()
    check_no_worse(outcomes)
    again, _ = quick(name)(job_with(spec), rounded(job_with(spec)))
    assert {key: parts(each) for key, each in codes.items()} == {
        key: parts(each) for key, each in again.items()
    }


# Models


def quantized(name: str, model: Any) -> tuple[Any, Any]:
    config = TorchConfig(SPECS["int4"], exclude=("lm_head",), algorithms=(quick(name),))
    report = quantize_model(model, tokens(4), config, progress=False)
    return model, report


@cache
def small() -> Any:
    return made(llama(num_hidden_layers=1))


@every_algorithm
def test_a_model_is_quantized_and_the_same_way_again(name: str) -> None:
    states = []
    for _ in range(2):
        model, report = quantized(name, copy.deepcopy(small()))
        layers = [each for each in model.modules() if isinstance(each, QuantizedLayer)]
        assert len(layers) == len(report.quantized) == 7
        assert torch.isfinite(logits(model, tokens()[0])).all()
        states.append([parts(layer.quantized) for layer in layers])
    assert states[0] == states[1]
    check_no_worse(report.outcomes)


@every_algorithm
def test_missing_data_is_one_error(name: str) -> None:
    value = quick(name)
    config = TorchConfig(SPECS["int4"], exclude=("lm_head",), algorithms=(value,))
    model = copy.deepcopy(small())
    before = logits(model, tokens()[0])
    if value.needs_data or any(each.needs_data for each in config.algorithms):
        with pytest.raises(DataError, match="data"):
            quantize_model(model, None, config, progress=False)
        assert torch.equal(logits(model, tokens()[0]), before)
    else:
        assert quantize_model(model, None, config, progress=False).quantized
