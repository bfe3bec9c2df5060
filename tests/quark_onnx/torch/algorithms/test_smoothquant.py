"""SmoothQuant of blocks: the formula, what is preserved, and what is gained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.torch.algorithms.base import BlockJob
from quark_onnx.torch.algorithms.rescaling import rescale
from quark_onnx.torch.algorithms.rescaling.channel_pairs import Pair
from quark_onnx.torch.algorithms.rescaling.smoothquant import (
    AutoSmoothQuant,
    SmoothQuant,
    factors,
)
from quark_onnx.torch.calibration.observers import ActivationObservers
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.pipelines.block import rounded_weight
from tests import torch_families
from tests.quark_onnx.torch.algorithms.blocks import change, inputs_of, job_of, model_of

INT8 = scheme("int8")
TOKENS = scheme("int8_per_channel")


def with_outliers(family: str = "llama3", spec: Any = INT8) -> BlockJob:
    """A block whose norms make some channels large, as those of trained models do."""
    model = model_of(family)
    for name, parameter in model.named_parameters():
        if name.endswith("layernorm.weight"):
            parameter.data[::13] = 20.0
        elif "layers" in name and parameter.ndim > 1:
            parameter.data.mul_(0.2)  # so that attention attends to more than one token
    return job_of(model, spec)


def rounded_error(job: BlockJob, targets: list[Any]) -> float:
    """How far the block is off once its layers are quantized."""
    with torch.no_grad(), ActivationObservers(job.layers) as watching:
        for call in job.calls:
            call.run(job.block)
    job.scales = watching.scales()
    made = {name: rounded_weight(name, job.layers) for name in job.layers}
    with (
        torch.no_grad(),
        job.put(
            job.quantized(
                {name: each for name, each in made.items() if each is not None}
            )
        ),
    ):
        found = [call.run(job.block) for call in job.calls]
    return sum(
        float((one - two).double().square().sum())
        for one, two in zip(found, targets, strict=True)
    )


def test_factors_against_the_formula() -> None:
    random = np.random.default_rng(0)
    largest, reach = random.uniform(0.1, 50, 200), random.uniform(0.01, 2, 200)
    for alpha in (0.0, 0.3, 0.5, 1.0):
        expected = np.maximum(largest**alpha / reach ** (1 - alpha), 1e-3)
        found = factors(torch.tensor(largest), torch.tensor(reach), alpha)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    assert factors(
        torch.tensor([1e-9, 4.0]), torch.tensor([1.0, 1.0]), 1.0, 0.01
    ).tolist() == pytest.approx([0.01, 4])


def test_the_scales_are_those_of_the_formula() -> None:
    job = with_outliers()
    x = inputs_of(job, "self_attn.q_proj")
    layers = [job.layers[f"{job.name}.self_attn.{name}_proj"][0] for name in "qkv"]
    weights = [layer.weight.detach().double().clone() for layer in layers]
    gain = job.block.input_layernorm.weight.detach().double().clone()
    SmoothQuant(alpha=0.6)(job)
    scale = x.abs().amax(0) ** 0.6 / torch.cat(weights).abs().amax(0) ** 0.4
    torch.testing.assert_close(
        job.block.input_layernorm.weight.double(), gain / scale, rtol=1e-5, atol=0
    )
    for layer, weight in zip(layers[:2], weights, strict=False):
        torch.testing.assert_close(
            layer.weight.double(), weight * scale, rtol=1e-5, atol=0
        )


@pytest.mark.parametrize(
    "algorithm", [SmoothQuant(), AutoSmoothQuant()], ids=lambda each: each.name
)
@pytest.mark.parametrize(
    "spec", [INT8, TOKENS, scheme("fp8")], ids=["int8", "int8_tokens", "fp8"]
)
def test_outliers_cost_less(algorithm: Any, spec: Any) -> None:
    job = with_outliers(spec=spec)
    with torch.no_grad():
        targets = [call.run(job.block) for call in job.calls]
    before = rounded_error(job, targets)
    outcomes = algorithm(job)
    assert not any(each.note for each in outcomes)
    assert (
        rounded_error(job, targets) < (0.5 if spec != scheme("fp8") else 1.01) * before
    )


@pytest.mark.parametrize("family", torch_families.FAMILIES)
def test_families_compute_what_they_did(family: str) -> None:
    job = job_of(model_of(family), TOKENS)
    outcomes = []
    assert change(job, lambda: outcomes.extend(AutoSmoothQuant(steps=4)(job))) < 1e-4
    assert outcomes and not any(each.note for each in outcomes)
    assert {each.layer for each in outcomes} <= set(job.layers)
    assert any(each.after < each.before for each in outcomes)


def test_the_best_alpha_is_no_worse_than_any() -> None:
    def errors(algorithm: Any) -> float:
        found = algorithm(with_outliers(spec=TOKENS))
        assert sum(each.after for each in found) <= sum(each.before for each in found)
        return next(each.after for each in found if each.layer.endswith("o_proj"))

    best = errors(AutoSmoothQuant(steps=4))
    assert all(
        best <= errors(SmoothQuant(alpha=alpha)) * 1.0001
        for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)
    )


def test_error_shares_are_those_of_the_layers() -> None:
    job = with_outliers(spec=scheme("uint4_wo_32"))
    x = inputs_of(job, "self_attn.o_proj")
    layer, spec = job.layers[f"{job.name}.self_attn.o_proj"]
    made = rounded_weight("o_proj", {"o_proj": (layer, spec)})
    assert made is not None
    exact = x @ layer.weight.detach().double().t()
    share = float(
        (x @ made.dequantize().double().t() - exact).square().sum()
        / exact.square().sum()
    )
    found = next(
        each for each in AutoSmoothQuant()(job) if each.layer.endswith("o_proj")
    )
    assert found.before == pytest.approx(share, rel=1e-3)


def test_channels_without_a_signal_stay() -> None:
    job = with_outliers()
    with torch.no_grad():
        job.block.input_layernorm.weight[3] = 0
    before = job.block.self_attn.q_proj.weight[:, 3].clone()
    SmoothQuant()(job)
    assert torch.equal(job.block.self_attn.q_proj.weight[:, 3], before)
    assert torch.isfinite(job.block.input_layernorm.weight).all()


def test_what_would_change_the_block_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = with_outliers()
    before = {
        name: tensor.detach().clone() for name, tensor in job.block.named_parameters()
    }
    own = Pair.apply

    def broken(self: Pair, block: Any, scale: Any) -> None:
        own(self, block, scale)
        if self.source == "input_layernorm":
            block.self_attn.q_proj.weight.data.mul_(1.5)

    monkeypatch.setattr(Pair, "apply", broken)
    outcomes = SmoothQuant()(job)
    noted = {each.layer.rsplit(".", 1)[-1] for each in outcomes if each.note}
    assert noted == {"q_proj", "k_proj", "v_proj"}
    note = next(each.note for each in outcomes if each.note)
    assert note.startswith("input_layernorm stays as it is")
    assert torch.equal(
        job.block.self_attn.q_proj.weight, before["self_attn.q_proj.weight"]
    )
    assert torch.equal(
        job.block.input_layernorm.weight, before["input_layernorm.weight"]
    )
    assert not torch.equal(job.block.mlp.up_proj.weight, before["mlp.up_proj.weight"])


def test_models_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(model_of("gemma2", torch.bfloat16), TOKENS)
    outcomes: list[Any] = []
    found = change(job, lambda: outcomes.extend(SmoothQuant()(job)))
    assert 0 < found < rescale.BOUND_SHORT and not any(each.note for each in outcomes)


def test_damaged_activations_are_named() -> None:
    job = with_outliers()
    job.calls[1].hidden[0, 2, 5] = torch.inf
    with pytest.raises(
        DataError, match=r"what self_attn\.\w_proj reads is infinite or no number"
    ):
        SmoothQuant()(job)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SmoothQuant(alpha=1.5),
            "alpha of smoothquant is 1.5; it must be a number of at least 0",
        ),
        (lambda: SmoothQuant(alpha=True), "alpha of smoothquant is True"),
        (lambda: SmoothQuant(scale_clamp_min=0), "scale_clamp_min of smoothquant is 0"),
        (
            lambda: AutoSmoothQuant(steps=0),
            "steps of autosmoothquant is 0; it must be a whole number of at least 1",
        ),
        (
            lambda: AutoSmoothQuant(scale_clamp_min="x"),
            "scale_clamp_min of autosmoothquant is 'x'",
        ),
    ],
)
def test_settings(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
