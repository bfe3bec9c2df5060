"""Qronos: against the paper's algorithm in float64.

And what activations are while codes are chosen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.algorithms.gptq.gptq import GroupInputs, Qronos
from quark_onnx.torch.algorithms.gptq.hessian import HessianStats
from quark_onnx.torch.algorithms.gptq.solver import Solver
from quark_onnx.torch.algorithms.weight_rounding.levels import TensorLevels
from quark_onnx.torch.config.algorithm_order import algorithm
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.torch_models import llama, made, tokens

SCALE, QMAX = 0.35, 3


def nearest(values: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.clip(np.rint(values / SCALE), -QMAX, QMAX) * SCALE
    return found


def by_the_paper(
    weight: np.ndarray, x: np.ndarray, wrong: np.ndarray, ridge: float
) -> np.ndarray:
    """Zhang et al. 2025, section 3: error correction beside all other columns, then error
    diffusion, column by column; each least squares problem is solved anew, in float64.

    Args:
        weight: (outputs, inputs).
        x: (tokens, inputs) of the float model.
        wrong: (tokens, inputs) of the quantized model.
        ridge: what is added to the diagonal of H.
    """
    hessian, mixed = wrong.T @ wrong, wrong.T @ x
    left, found = weight.copy(), np.zeros_like(weight)
    aim = (
        mixed @ weight.T + ridge * weight.T
    )  # the ridge pulls columns towards the float weight
    for place in range(weight.shape[1]):
        if place:
            value = left[:, place]
        else:
            value = (weight @ mixed[0] - weight[:, 1:] @ hessian[0, 1:]) / hessian[0, 0]
        found[:, place] = nearest(value)
        rest, done = slice(place + 1, None), slice(0, place + 1)
        damped = hessian[rest, rest] + ridge * np.eye(len(hessian) - place - 1)
        left[:, rest] = np.linalg.solve(
            damped, aim[rest] - hessian[rest, done] @ found[:, done].T
        ).T
    return found


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(24, 12), (9, 80)])
def test_codes_are_those_of_the_paper(rows: int, columns: int, act_order: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    mix = torch.randn(columns, columns, generator=generator)
    x = torch.randn(6 * columns, columns, generator=generator) @ mix
    wrong = x + 0.3 * x.std() * torch.randn(x.shape, generator=generator)
    weight = torch.randn(rows, columns, generator=generator) * 0.6
    gram = HessianStats()
    gram.add(wrong, x)
    gram.completed()
    power = gram.xx.diagonal().clone()
    make = Qronos(search_scales=False, coordinate_descent_passes=0, act_order=act_order)
    solver = Solver.of(gram.xx, make.damping, act_order)
    steps = TensorLevels(torch.full((rows, 1), SCALE), None, -QMAX, QMAX, size=columns)
    start = quantize(weight, TensorSpec("int3", per_channel=True))
    search = make.layer_search("layer", weight, start, GroupInputs(gram, power, solver))
    found = solver.quantize(search.target, [steps], 0, search.first_column).Q.numpy()
    order = solver.order.numpy()
    aim, left, right = (each.double().numpy()[:, order] for each in (weight, x, wrong))
    wanted = by_the_paper(aim, left, right, float(solver.ridge[0]))
    assert (
        np.abs(found[:, order] - wanted) < 1e-4
    ).mean() > 0.98  # float32 beside float64: a tie now and then
    assert (np.abs(found - nearest(weight.numpy())) > 1e-4).mean() > 0.1


def codes(model: Any) -> dict[str, Any]:
    layers = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, QuantizedLayer)
    }
    return {
        name: each.quantized.dequantize()
        for name, each in layers.items()
        if each.quantized is not None
    }


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one
    )


SCHEMES = {
    "mxfp4": LayerSpec(scheme("mxfp4").weight),
    "int8": LayerSpec(scheme("int8").weight),
    "uint4_int8": LayerSpec(scheme("uint4_int8").weight),
}


@pytest.mark.parametrize("name", ["gptq", "gptaq", "qronos"])
@pytest.mark.parametrize("row", SCHEMES)
def test_activations_are_float_while_codes_are_chosen(row: str, name: str) -> None:
    """Codes are those of the weight-only scheme; activations are quantized afterwards."""
    found = dict[str, Any]()
    for key, spec, text in (
        ("both", scheme(row), name),
        ("weights", SCHEMES[row], name),
        ("rounded", scheme(row), f"{name}:rounds_activations=true"),
    ):
        model = made(llama())
        config = TorchConfig(spec, exclude=("lm_head",), algorithms=(text,))
        quantize_model(model, tokens(4, 16), config, progress=False)
        found[key] = codes(model)
        layer = model.model.layers[0].mlp.down_proj
        assert (layer.input is None) == (key == "weights")
    assert alike(found["both"], found["weights"])
    assert not alike(found["both"], found["rounded"])


def test_an_algorithm_behind_it_that_rounds_activations_is_run_on_rounded_ones() -> (
    None
):
    """Each algorithm sees what it asks for, and the next block what the last one of them needs."""
    found = dict[str, Any]()
    for text in ("gptaq", "gptaq:rounds_activations=true"):
        model = made(llama())
        config = TorchConfig(
            scheme("mxfp4"),
            exclude=("lm_head",),
            algorithms=(text, "autoround:steps=3"),
        )
        report = quantize_model(model, tokens(4, 16), config, progress=False)
        found[text] = codes(model)
        assert {each.algorithm for each in report.outcomes} == {"gptaq", "autoround"}
    assert not alike(*found.values())


def test_the_setting_is_true_or_false() -> None:
    assert algorithm("qronos:rounds_activations=true") == Qronos(
        rounds_activations=True
    )
    with pytest.raises(
        ConfigError, match="rounds_activations of qronos is 1; it must be true or false"
    ):
        algorithm("qronos:rounds_activations=1")
