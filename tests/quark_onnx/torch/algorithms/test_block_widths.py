"""Blocks whose outputs have another width than their inputs, as in AMD Quark's example of
SmoothQuant.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from quark_onnx.torch.algorithms.rescaling.smoothquant import SmoothQuant
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.pipelines.in_memory import quantize_model

#: Those that work block by block.
ALGORITHMS = (
    "smoothquant",
    "autosmoothquant",
    "awq",
    "clip",
    "hqq",
    "gptq",
    "gptaq",
    "qronos",
    "autoround:steps=3",
)


class _Net(nn.Module):
    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class _Wide(nn.Sequential):
    pass


@pytest.mark.parametrize("widths", [(64, 128), (64, 128, 256), (64, 128, 64), (64, 1)])
@pytest.mark.parametrize(
    "name",
    [
        "smoothquant",
        "autosmoothquant",
        "awq",
        "gptq",
        "gptaq",
        "qronos",
        "autoround:steps=3",
    ],
)
def test_blocks_whose_outputs_have_another_width(
    name: str, widths: tuple[int, ...]
) -> None:
    """Algorithms take blocks whose output is wider or narrower than their input: rescaling is done,
    and the outputs are those of the float model but for rounding.
    """
    torch.manual_seed(0)
    blocks = [
        _Wide(nn.LayerNorm(one), nn.Linear(one, two)) for one, two in pairwise(widths)
    ]
    model = _Net(*blocks)
    with torch.no_grad():
        blocks[0][0].weight.copy_(torch.logspace(-1, 1, 64))
    data = [torch.randn(2, 6, 64) for _ in range(3)]
    expected = [model(x).detach().double() for x in data]
    config = TorchConfig(
        scheme("int8_per_channel" if "smooth" in name else "uint4_wo_32"),
        algorithms=(name,),
    )
    report = quantize_model(model, data, config, progress=False)
    assert len(report.quantized) == len(blocks) and not report.notes
    for x, wanted in zip(data, expected, strict=True):
        assert float((model(x).detach() - wanted).norm() / wanted.norm()) < 0.3
    if "smooth" in name or name == "awq":
        assert not torch.equal(blocks[0][0].weight, torch.logspace(-1, 1, 64))


def test_smoothquant_is_what_the_paper_says_in_a_wider_block() -> None:
    """The scale of each channel is max|x|^a / max|w|^(1-a) (Xiao et al.

    2023, eq. 4), computed here in float64.
    """
    torch.manual_seed(0)
    norm, linear = nn.LayerNorm(64), nn.Linear(64, 128)
    with torch.no_grad():
        norm.weight.copy_(torch.logspace(-1, 1, 64))
    gain, weight = (
        norm.weight.detach().double().clone(),
        linear.weight.detach().double().clone(),
    )
    x = torch.randn(4, 8, 64)
    reads = norm(x).detach().double().flatten(0, -2)
    model = _Net(_Wide(norm, linear))
    config = TorchConfig(
        scheme("int8_per_channel"), algorithms=(SmoothQuant(alpha=0.5),)
    )
    quantize_model(model, [x], config, progress=False)
    scale = (reads.abs().amax(0) / weight.abs().amax(0)).sqrt()
    torch.testing.assert_close(
        norm.weight.detach().double(), gain / scale, rtol=1e-4, atol=0
    )
