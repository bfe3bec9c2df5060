"""HQQ: against all scales and zero points of tiny blocks, never worse than the nearest, with data
and without.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quark_onnx.common.errors import ConfigError
from quark_onnx.kernels.hqq import half_quadratic
from quark_onnx.torch.algorithms.base import BlockJob
from quark_onnx.torch.algorithms.hqq import HQQ
from quark_onnx.torch.calibration.block_stream import BlockArguments
from quark_onnx.torch.config.algorithm_order import algorithm
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests import torch_families
from tests.cases import loop_over
from tests.nbits import dequantized, quantized
from tests.torch_models import llama, logits, made, tokens


def job_of(
    weight: Any, spec: TensorSpec, x: Any = None
) -> tuple[BlockJob, dict[str, Any]]:
    block = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    block[0].weight.data = weight
    calls = [] if x is None else [BlockArguments(part) for part in x.split(1)]
    layers = {"b.0": (block[0], LayerSpec(spec))}
    return BlockJob("b", block, layers, calls, calls), {"b.0": quantize(weight, spec)}


def normal(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


FORMATS = [
    (name, kind, dtype)
    for name in ("uint2", "uint3", "uint4", "uint8", "int2", "int4")
    for kind in ("channel", 32)
    for dtype in (torch.float32, torch.bfloat16)
]


def spec_of(name: str, kind: Any) -> TensorSpec:
    return TensorSpec(
        name,
        symmetric=False,
        per_channel=kind == "channel",
        block_size=kind if kind == 32 else 0,
    )


@loop_over(("name", "kind", "dtype"), FORMATS)
def test_rows_are_never_worse_and_the_whole_is_better(
    name: str, kind: Any, dtype: Any
) -> None:
    weight = normal(32, 80).to(dtype)
    job, start = job_of(weight, spec_of(name, kind))
    found, outcomes = HQQ()(job, start)
    layer, plain = found["b.0"], start["b.0"]
    errors = [
        (each.dequantize(torch.float64) - weight.double()).square().sum(1)
        for each in (plain, layer)
    ]
    assert bool((errors[1] <= errors[0] * (1 + 1e-6)).all())
    assert float(errors[1].sum()) < 0.97 * float(errors[0].sum())
    power = float(weight.double().square().sum())
    wanted = [float(each.sum()) / power for each in errors]
    assert [outcomes[0].before, outcomes[0].after] == pytest.approx(wanted, rel=1e-4)
    grid = layer.spec.grid
    assert layer.scale.dtype == plain.scale.dtype and bool((layer.scale > 0).all())
    assert bool(
        (
            (layer.zero >= grid.qmin)
            & (layer.zero <= grid.qmax)
            & (layer.zero == layer.zero.round())
        ).all()
    )
    assert torch.equal(
        quantize(weight, layer.spec, params=(layer_params(layer))).codes, layer.codes
    )
    again, _ = HQQ()(job, start)
    for part in ("codes", "scale", "zero"):
        assert torch.equal(getattr(again["b.0"], part), getattr(layer, part))


def layer_params(layer: Any) -> Any:
    from quark_onnx.torch.formats.affine import Params

    return Params(layer.scale, layer.zero)


@pytest.mark.parametrize("bits", [2, 4])
def test_it_is_that_of_the_onnx_flow(bits: int) -> None:
    """Where the nearest of both flows is worse, they agree on what is left of the weight."""
    weight = normal(16, 64, seed=1)
    job, start = job_of(weight, spec_of(f"uint{bits}", 32))
    found, _ = HQQ()(job, start)
    other = dequantized(
        quantized(
            weight.T.numpy(), bits, 32, lambda blocks: half_quadratic(blocks, bits)
        )
    ).T
    kept = [
        (found["b.0"].codes[row] == start["b.0"].codes[row]).all().item()
        for row in range(16)
    ]
    assert sum(kept) < 4
    for row in np.flatnonzero(~np.array(kept)):
        np.testing.assert_allclose(
            found["b.0"].dequantize()[row].numpy(), other[row], rtol=1e-5, atol=1e-6
        )


def test_it_comes_near_to_the_best_of_all_grids() -> None:
    weight = normal(24, 12, seed=2)
    job, start = job_of(weight, spec_of("uint2", "channel"))
    found, _ = HQQ()(job, start)
    errors = [
        (each["b.0"].dequantize() - weight).square().sum(1).numpy()
        for each in (start, found)
    ]
    reals, best = weight.double().numpy(), np.full(24, np.inf)
    for share, zero in itertools.product(np.linspace(0.2, 2.0, 361), range(4)):
        scale = share * np.ptp(reals, axis=1, keepdims=True) / 3
        left = (np.clip(np.rint(reals / scale) + zero, 0, 3) - zero) * scale
        best = np.minimum(best, np.square(left - reals).sum(1))
    assert (errors[1] >= best * 0.999).all()
    assert np.median(errors[1] / best) < 1.15 < np.median(errors[0] / best)


def test_data_decides_where_it_is_there() -> None:
    """Inputs that read one half of the weight hardly at all: an output keeps what is better on
    these inputs.
    """
    weight = normal(64, 32, seed=3)
    x = normal(4, 16, 32, seed=4)
    x[..., 16:] *= 0.01
    spec = spec_of("uint3", "channel")
    job, start = job_of(weight, spec, x)
    found, outcomes = HQQ()(job, start)
    plain, _ = HQQ()(job_of(weight, spec)[0], start)

    def errors(made: Any) -> Any:
        off = made["b.0"].dequantize(torch.float64) - weight.double()
        return (off @ x.reshape(-1, 32).double().T).square().sum(1)

    assert bool((errors(found) <= errors(start) * (1 + 1e-5)).all())
    assert bool(
        (errors(plain) > errors(start) * 1.01).any()
    )  # weights alone do not know it
    power = float((weight.double() @ x.reshape(-1, 32).double().T).square().sum())
    assert outcomes[0].after == pytest.approx(
        float(errors(found).sum()) / power, rel=1e-4
    )
    assert outcomes[0].after < outcomes[0].before


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("int4", block_size=32),
        TensorSpec("uint8", symmetric=False),
        TensorSpec("fp8e4m3"),
        TensorSpec("mxfp4e2m1"),
        TensorSpec("bfloat16"),
    ],
    ids=str,
)
def test_other_formats_keep_their_codes(spec: TensorSpec) -> None:
    job, start = job_of(normal(4, 32), spec)
    found, outcomes = HQQ()(job, start)
    assert found == start
    assert "only asymmetric integers of blocks or outputs" in outcomes[0].note


@pytest.mark.parametrize("family", torch_families.FAMILIES)
@pytest.mark.parametrize("data", [False, True])
def test_families(family: str, data: bool) -> None:
    model = made(torch_families.config_of(family))
    spec = LayerSpec(TensorSpec("uint3", symmetric=False, block_size=32))
    # on one input alone, the last layer of gpt2's kind may already be at its best
    config = TorchConfig(
        spec,
        exclude=(torch_families.head_of(family),),
        algorithms=("hqq", "gptq") if data else ("hqq",),
    )
    report = quantize_model(model, tokens(2) if data else None, config, progress=False)
    own = [each for each in report.outcomes if each.algorithm == "hqq"]
    assert own and all(each.after <= each.before for each in own)
    assert sum(each.after for each in own) < sum(each.before for each in own)
    assert torch.isfinite(logits(model, tokens(1)[0])).all()


def test_a_model_comes_nearer_to_the_float_one() -> None:
    float_model, plain, better = (made(llama()) for _ in range(3))
    config = TorchConfig(
        LayerSpec(TensorSpec("uint2", symmetric=False, block_size=32)),
        exclude=("lm_head",),
    )
    quantize_model(plain, None, config, progress=False)
    quantize_model(better, None, config.with_(algorithms=HQQ()), progress=False)
    wanted, before, after = (
        torch.cat([logits(model, batch) for batch in tokens(4)])
        for model in (float_model, plain, better)
    )
    assert (after - wanted).square().mean() < 0.9 * (before - wanted).square().mean()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p": 2.0}, "p is 2.0; it must be above 0 and at most 1"),
        ({"beta": 0}, "beta is 0; it must be above 0"),
        (
            {"iterations": -1},
            "iterations of hqq is -1; it must be a whole number of at least 0",
        ),
        (
            {"iterations": 2.5},
            "iterations of hqq is 2.5; it must be a whole number of at least 0",
        ),
        ({"kappa": "big"}, "kappa of hqq is 'big'; it must be a number"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HQQ(**settings)
    assert algorithm("hqq:iterations=40") == HQQ(iterations=40)


def test_the_head_is_solved_for_whether_blocks_are_run_or_not() -> None:
    spec = LayerSpec(TensorSpec("uint4", symmetric=False, block_size=32))
    alone, beside = made(llama()), made(llama())
    quantize_model(alone, None, TorchConfig(spec, algorithms="hqq"), progress=False)
    quantize_model(
        beside, tokens(1), TorchConfig(spec, algorithms=("gptq", "hqq")), progress=False
    )
    assert spec.weight is not None
    plain = quantize(made(llama()).lm_head.weight, spec.weight)
    assert torch.equal(alone.lm_head.codes, beside.lm_head.codes)
    assert not torch.equal(alone.lm_head.codes, plain.codes)
