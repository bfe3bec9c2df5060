"""SignedRounding: gradients against finite differences, the optimum of tiny blocks, every format,
all families.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.algorithms.base import BlockJob
from quark_onnx.torch.algorithms.gptq.gptq import GPTQ
from quark_onnx.torch.algorithms.learned_rounding import autoround
from quark_onnx.torch.algorithms.learned_rounding.autoround import SignedRounding
from quark_onnx.torch.algorithms.learned_rounding.trainable_weight import (
    TrainableWeight,
)
from quark_onnx.torch.algorithms.weight_rounding.levels import TensorLevels
from quark_onnx.torch.calibration.block_stream import BlockArguments
from quark_onnx.torch.config.algorithm_order import algorithm
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests import torch_families
from tests.cases import loop_over
from tests.torch_models import llama, logits, made, tokens

UINT4 = LayerSpec(TensorSpec("uint4", symmetric=False, block_size=32))
FORMATS = {
    **{
        f"int{bits} {kind}": (f"int{bits}", True, kind)
        for bits in (2, 3, 4, 8)
        for kind in ("tensor", "channel", 32)
    },
    **{
        f"uint{bits} {kind}": (f"uint{bits}", False, kind)
        for bits in (2, 3, 4, 8)
        for kind in ("channel", 32)
    },
    "int4 asymmetric": ("int4", False, 32),
    "uint8 symmetric": ("uint8", True, "channel"),
    "fp8e4m3": ("fp8e4m3", True, "tensor"),
    "fp8e5m2": ("fp8e5m2", True, "channel"),
    **{
        name: (name, True, 0)
        for name in (
            "mxfp4e2m1",
            "mxfp6e2m3",
            "mxfp6e3m2",
            "mxfp8e4m3",
            "mxfp8e5m2",
            "mxint8",
            "nvfp4",
        )
    },
}


def spec_of(name: str) -> TensorSpec:
    dtype, symmetric, kind = FORMATS[name]
    blocks = kind if isinstance(kind, int) else 0
    return TensorSpec(
        dtype, symmetric=symmetric, block_size=blocks, per_channel=kind == "channel"
    )


def normal(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trainable(weight: Any, start: Any) -> TrainableWeight:
    steps = TensorLevels.of(start)
    assert steps is not None
    return TrainableWeight(weight, start, steps)


def same(one: Any, other: Any) -> bool:
    """Whether two weights have the same bytes."""
    parts = (
        (getattr(one, part), getattr(other, part))
        for part in ("codes", "scale", "zero")
    )
    return all(
        a is b
        or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in parts
    )


@loop_over("dtype", [torch.float32, torch.bfloat16])
@loop_over("name", tuple(FORMATS))
def test_it_starts_from_the_codes_and_computes_what_they_stand_for(
    name: str, dtype: Any
) -> None:
    weight = normal(6, 80).to(dtype)
    weight[2] = weight[2].abs()  # a zero point at an end
    start = quantize(weight, spec_of(name))
    # what another algorithm may have left: codes of a neighbour here and there
    params = Params(start.scale, start.zero)
    other = quantize(
        (weight + 0.3 * normal(6, 80, seed=1)).to(dtype), spec_of(name), params=params
    )
    moved = replace(start, codes=other.codes)
    for each in (start, moved):
        trained = trainable(weight, each)
        assert same(trained.made(), each)
        assert torch.equal(trained.weight().detach(), each.dequantize())
    with torch.no_grad():  # and anywhere else
        for leaf in trained.leaves()[1:]:
            leaf.mul_(
                0.9
                - 0.2
                * torch.rand(leaf.shape, generator=torch.Generator().manual_seed(2))
            )
        trained.shift.add_(0.4 * normal(*trained.shift.shape, seed=3))
        trained.hold()
    assert torch.equal(trained.weight().detach(), trained.made().dequantize())
    assert not same(trained.made(), moved)


def smooth(
    weight: np.ndarray, shift: np.ndarray, high: float, low: float, start: Any
) -> np.ndarray:
    """One output of a weight of uint4 in float64; what its roundings do to it is a constant."""
    scale0, zero0 = float(start.scale), float(start.zero)
    scale = scale0 * ((15 - zero0) * high + zero0 * low) / 15
    rounding = np.round(weight / scale0) - weight / scale0
    return (weight / scale + shift + rounding) * scale


def test_gradients_are_those_of_what_roundings_let_through() -> None:
    """Beside finite differences in float64 of the function whose roundings move along with what is
    rounded.
    """
    weight = normal(1, 12, seed=4)
    start = quantize(weight, TensorSpec("uint4", symmetric=False, per_channel=True))
    clipped = int(weight.argmax())
    weight[0, clipped] *= 2  # has the greatest code, and stays there
    trained = trainable(weight, start)
    slope = normal(1, 12, seed=5)
    (trained.weight() * slope).sum().backward()
    free = np.arange(12) != clipped
    reals, slopes = weight[0].double().numpy(), slope[0].double().numpy()
    scale0, zero0 = float(start.scale), float(start.zero)

    def value(shift: Any = 0.0, high: float = 1.0, low: float = 1.0) -> float:
        found = smooth(reals, np.zeros(12) + shift, high, low, start)
        scale = scale0 * ((15 - zero0) * high + zero0 * low) / 15
        found[clipped] = (15 - zero0 * low * scale0 / scale) * scale
        return float(found @ slopes)

    assert value() == pytest.approx(float((start.dequantize() * slope).sum()), rel=1e-5)
    step = 1e-6
    for place in range(12):
        unit = np.eye(12)[place] * step
        wanted = (value(unit) - value(-unit)) / 2 / step if free[place] else 0.0
        assert trained.shift.grad[0, place].item() == pytest.approx(
            wanted, rel=1e-4, abs=1e-6
        )
    for leaf, name in ((trained.high, "high"), (trained.low, "low")):
        assert leaf is not None
        sides = [value(**{name: 1 + way * step}) for way in (1, -1)]
        assert leaf.grad.item() == pytest.approx(
            (sides[0] - sides[1]) / 2 / step, rel=1e-3
        )


def job_of(
    weight: Any, x: Any, spec: LayerSpec, target: Any = None
) -> tuple[BlockJob, dict[str, Any]]:
    """A block of one layer, with its weight rounded to the nearest."""
    block = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    block[0].weight.data = weight
    calls = [BlockArguments(part) for part in x.split(1)]
    targets = (
        [call.hidden @ weight.T for call in calls]
        if target is None
        else list(target.split(1))
    )
    assert spec.weight is not None
    return BlockJob("b", block, {"b.0": (block[0], spec)}, calls, calls, targets), {
        "b.0": quantize(weight, spec.weight, "b.0")
    }


@pytest.mark.parametrize("optimizer", ["adam", "sign"])
def test_it_finds_nearly_the_best_of_all_roundings(optimizer: str) -> None:
    weight = normal(1, 8, seed=6)
    mix = normal(8, 8, seed=7)
    x = normal(16, 4, 8, seed=8) @ mix
    job, start = job_of(weight, x, LayerSpec(TensorSpec("int3", per_channel=True)))
    settings = SignedRounding(
        400, lr=0.01, batch=16, tune_ranges=False, optimizer=optimizer
    )
    found, outcomes = settings(job, start)
    scale = float(start["b.0"].scale)
    assert same(
        replace(found["b.0"], codes=start["b.0"].codes), start["b.0"]
    )  # scales stay
    rows = x.reshape(-1, 8).double().numpy()

    def error(codes: np.ndarray) -> np.ndarray:
        return np.square((codes * scale - weight.double().numpy()) @ rows.T).sum(-1)

    below = np.floor(weight[0].double().numpy() / scale)
    every = np.array(
        [below + choice for choice in itertools.product((0, 1), repeat=8)]
    ).clip(-4, 3)
    all_errors = np.sort(error(every))
    nearest, ours = (
        error(start["b.0"].codes.numpy())[0],
        error(found["b.0"].codes.numpy())[0],
    )
    assert ours <= all_errors[7] * (1 + 1e-9)  # of 256
    assert ours < 0.6 * nearest
    power = np.square(weight.double().numpy() @ rows.T).sum()
    assert [outcomes[0].before, outcomes[0].after] == pytest.approx(
        [nearest / power, ours / power], rel=1e-4
    )


def test_ranges_are_found() -> None:
    """A value that no input reads makes the range three times too wide."""
    weight = normal(4, 16, seed=9).clamp(-1, 1)
    weight[:, 0] = 3
    x = normal(8, 8, 16, seed=10)
    x[..., 0] = 0
    spec = LayerSpec(TensorSpec("int3", per_channel=True))
    (job, start), errors = job_of(weight, x, spec), []
    for ranges in (False, True):
        found, outcomes = SignedRounding(300, minmax_lr=0.01, tune_ranges=ranges)(
            job, start
        )
        errors.append(outcomes[0].after)
    assert errors[1] < 0.7 * errors[0] < 0.7 * outcomes[0].before
    assert bool((found["b.0"].scale < 0.7 * start["b.0"].scale).all())


def test_what_activations_lose_is_known() -> None:
    """Rounded to 2 bits, activations are half as large as they were: weights make good for it, as
    far as ranges go.
    """
    weight = normal(4, 32, seed=11)
    x = normal(8, 8, 32, seed=12)
    spec = LayerSpec(
        TensorSpec("int8", per_channel=True),
        TensorSpec("int2", per_channel=True, dynamic=True),
    )
    job, start = job_of(weight, x, spec)
    found, outcomes = SignedRounding(200, lr=0.05)(job, start)
    rounded = torch.cat(
        [job.quantized({})["b.0"].input(call.hidden) for call in job.calls]
    )
    target = torch.cat(list(job.targets))
    wanted = [
        float((rounded @ each["b.0"].dequantize().T - target).square().sum())
        for each in (start, found)
    ]
    power = float(target.square().sum())
    assert [outcomes[0].before, outcomes[0].after] == pytest.approx(
        [each / power for each in wanted], rel=1e-4
    )
    assert outcomes[0].after < 0.95 * outcomes[0].before


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gets_better(name: str) -> None:
    weight = normal(16, 64, seed=13)
    x = normal(8, 16, 64, seed=14) @ normal(64, 64, seed=15)
    job, start = job_of(weight, x, LayerSpec(spec_of(name)))
    found, outcomes = SignedRounding(60)(job, start)
    assert outcomes[0].after < 0.98 * outcomes[0].before
    layer = found["b.0"]
    assert (
        layer.codes.dtype == start["b.0"].codes.dtype
        and layer.scale.dtype == start["b.0"].scale.dtype
    )
    off = (layer.dequantize() - weight) @ x.reshape(-1, 64).T
    power = float((weight @ x.reshape(-1, 64).T).square().sum())
    assert outcomes[0].after == pytest.approx(
        float(off.square().sum()) / power, rel=1e-3
    )
    again, _ = SignedRounding(60)(job, start)
    assert same(again["b.0"], layer)
    other, _ = SignedRounding(60, seed=1, batch=3)(job, start)
    assert not same(other["b.0"], layer)


@pytest.mark.parametrize(("together", "calls"), [(1, 8), (4, 2), (16, 1)])
def test_a_step_looks_at_so_many_samples_however_many_are_run_together(
    together: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = normal(4, 16), normal(32, 4, 16, seed=1)
    job, start = job_of(weight, x, LayerSpec(TensorSpec("int4", per_channel=True)))
    parts = [BlockArguments(part) for part in x.split(together)]
    job = replace(
        job,
        calls=parts,
        floats=parts,
        targets=[call.hidden @ weight.T for call in parts],
    )
    seen = []
    drawn = autoround.draws
    monkeypatch.setattr(
        autoround, "draws", lambda *of: (seen.append(of[:2]), drawn(*of))[1]
    )
    SignedRounding(20, batch=8)(job, start)
    assert seen == [(32 // together, calls)]


def test_it_is_never_worse() -> None:
    job, start = job_of(
        normal(4, 16),
        normal(4, 4, 16, seed=1),
        LayerSpec(TensorSpec("int4", per_channel=True)),
    )
    _, outcomes = SignedRounding(5, lr=1.0, minmax_lr=1.0, optimizer="sign")(job, start)
    assert outcomes[0].after <= outcomes[0].before
    best, _ = SignedRounding(300)(job, start)
    same_start, after = SignedRounding(5, lr=1.0, optimizer="sign")(job, best)
    assert after[0].after <= after[0].before and (
        after[0].after < after[0].before or same(same_start["b.0"], best["b.0"])
    )


@pytest.mark.parametrize("name", ["bfloat16", "mx6", "bfp16", "fp4e2m1"])
def test_formats_without_steps_keep_their_codes(name: str) -> None:
    job, start = job_of(normal(4, 32), normal(2, 2, 32), LayerSpec(TensorSpec(name)))
    found, outcomes = SignedRounding(5)(job, start)
    assert found == start
    assert [each.note for each in outcomes] == [
        f"{name} has no steps that can be trained; its codes stay"
    ]
    found, outcomes = GPTQ()(job, start)
    assert found == start
    assert [each.note for each in outcomes] == [f"{name} is rounded to the nearest"]


@pytest.mark.parametrize("family", torch_families.FAMILIES)
def test_families(family: str) -> None:
    model = made(torch_families.config_of(family))
    config = TorchConfig(
        UINT4,
        exclude=(torch_families.head_of(family),),
        algorithms=("autoround:steps=20",),
    )
    report = quantize_model(model, tokens(2), config, progress=False)
    assert report.outcomes and all(
        each.after < 0.9 * each.before for each in report.outcomes
    )
    assert torch.isfinite(logits(model, tokens(1)[0])).all()
    assert not any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["int8", "mxfp4", "ptpc_fp8", "nvfp4", "uint4_wo_per_channel"]
)
def test_models_come_nearer_to_the_float_one(name: str) -> None:
    models = _, plain, better = [made(llama()) for _ in range(3)]
    config = TorchConfig(scheme(name), exclude=("lm_head",))
    data = tokens(48, 48)
    quantize_model(plain, data, config, progress=False)
    report = quantize_model(
        better, data, config.with_(algorithms=SignedRounding(40)), progress=False
    )
    assert all(each.after < each.before for each in report.outcomes)
    held_out = torch.randint(
        0, 96, (256, 48), generator=torch.Generator().manual_seed(0)
    )
    found = [logits(model, held_out) for model in models]
    errors = [float((each - found[0]).square().mean()) for each in found[1:]]
    assert errors[1] < errors[0]


def test_it_goes_on_from_gptq() -> None:
    config = TorchConfig(
        UINT4, exclude=("lm_head",), algorithms=(GPTQ(), SignedRounding(30))
    )
    model = made(llama())
    report = quantize_model(model, tokens(4), config, progress=False)
    rounds = [each for each in report.outcomes if each.algorithm == "autoround"]
    assert all(each.after <= each.before for each in rounds)
    alone = made(llama())
    other = quantize_model(
        alone, tokens(4), config.with_(algorithms=(SignedRounding(30),)), progress=False
    )
    first = other.outcomes[0]
    assert rounds[0].layer == first.layer and rounds[0].before != first.before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"steps": 0},
            "steps of autoround is 0; it must be a whole number of at least 1",
        ),
        ({"batch": 1.5}, "batch of autoround is 1.5"),
        ({"lr": -0.1}, "lr of autoround is -0.1; it must be a number of at least 0"),
        ({"minmax_lr": float("nan")}, "minmax_lr of autoround is nan"),
        ({"tune_ranges": 1}, "tune_ranges of autoround is 1; it must be true or false"),
        (
            {"optimizer": "sgd"},
            "optimizer of autoround is 'sgd'; it must be one of: adam, sign",
        ),
        ({"seed": -1}, "seed of autoround is -1"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SignedRounding(**settings)
    assert algorithm("autoround:steps=50,optimizer=sign") == SignedRounding(
        50, optimizer="sign"
    )
