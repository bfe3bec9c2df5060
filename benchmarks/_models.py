"""Models that benchmarks build themselves: a known network's shape with random weights, always the
same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

STAGES = (
    (64, 3),
    (128, 4),
    (256, 6),
    (512, 3),
)  # ResNet-50: bottleneck width and blocks of each stage


class _Builder:
    """Appends layers and their seeded weights to a growing graph."""

    def __init__(self, batch_norm: bool) -> None:
        self.batch_norm, self.random = batch_norm, np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(op, list(inputs), [f"{name}_out"], name, **attributes)
        )
        return f"{name}_out"

    def weight(self, array: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> str:
        self.weights.append(
            numpy_helper.from_array(
                array.astype(np.float32), f"weight_{len(self.weights)}"
            )
        )
        return self.weights[-1].name

    def conv(
        self,
        x: str,
        channels: tuple[int, int],
        kernel: int,
        stride: int = 1,
        gain: float = 2.0,
    ) -> str:
        """A convolution with He-initialized weights, then its BatchNormalization unless that is
        folded.
        """
        into, out = channels
        weight = self.random.normal(
            0, np.sqrt(gain / (into * kernel**2)), (out, into, kernel, kernel)
        )
        bias = self.random.normal(0, 0.05, out)
        attributes = {
            "kernel_shape": [kernel] * 2,
            "strides": [stride] * 2,
            "pads": [kernel // 2] * 4,
        }
        if not self.batch_norm:
            return self.node(
                "Conv", x, self.weight(weight), self.weight(bias), **attributes
            )
        y = self.node("Conv", x, self.weight(weight), **attributes)
        mean, variance = (
            self.random.normal(0, 0.05, out),
            self.random.uniform(0.8, 1.2, out),
        )
        return self.node(
            "BatchNormalization",
            y,
            *map(self.weight, (np.ones(out), bias, mean, variance)),
        )

    def bottleneck(self, x: str, into: int, width: int, stride: int) -> str:
        y = self.node("Relu", self.conv(x, (into, width), 1))
        y = self.node("Relu", self.conv(y, (width, width), 3, stride))
        y = self.conv(
            y, (width, 4 * width), 1, gain=0.5
        )  # keeps the sum over 16 blocks in range
        shortcut = (
            x
            if into == 4 * width and stride == 1
            else self.conv(x, (into, 4 * width), 1, stride, gain=1.0)
        )
        return self.node("Relu", self.node("Add", y, shortcut))

    def grouped(
        self,
        x: str,
        channels: tuple[int, int],
        kernel: int,
        groups: int,
        stride: int = 1,
        dilation: int = 1,
    ) -> str:
        """A convolution of groups of channels, without BatchNormalization."""
        into, out = channels[0] // groups, channels[1]
        deviation = np.sqrt(1.5 / (into * kernel**2))
        weight = self.random.normal(0, deviation, (out, into, kernel, kernel))
        return self.node(
            "Conv",
            x,
            self.weight(weight),
            self.weight(self.random.normal(0, 0.05, out)),
            group=groups,
            strides=[stride] * 2,
            dilations=[dilation] * 2,
            pads=[dilation * (kernel // 2)] * 4,
        )

    def prelu(self, x: str, channels: int) -> str:
        slopes = self.random.uniform(0.05, 0.4, (channels, 1, 1))
        return self.node("PRelu", x, self.weight(slopes))

    def pyramid(self, x: str, into: int, out: int, stride: int) -> str:
        """A unit of ESPNetv2: depthwise convolutions of four dilations, summed and joined."""
        width = out // 4
        y = self.prelu(self.grouped(x, (into, width), 1, 4), width)
        branches = [
            self.grouped(y, (width, width), 3, width, stride, dilation)
            for dilation in (1, 2, 3, 4)
        ]
        for index in (1, 2, 3):
            branches[index] = self.node("Add", branches[index], branches[index - 1])
        joined = self.node("Concat", *branches, axis=1)
        statistics = (
            self.random.uniform(0.5, 1.5, out),
            self.random.normal(0, 0.1, out),
            self.random.normal(0, 0.05, out),
            self.random.uniform(0.8, 1.2, out),
        )
        joined = self.node("BatchNormalization", joined, *map(self.weight, statistics))
        y = self.grouped(self.prelu(joined, out), (out, out), 1, 4)
        if stride == 1:
            y = self.node("Add", y, x)
        return self.prelu(y, out)


def espnet(path: Path) -> Path:
    """Write a network in the manner of ESPNetv2, with 40 PRelu ('input': 1 x 3 x 256 x 256)."""
    b = _Builder(batch_norm=False)
    x, into = b.prelu(b.grouped("input", (3, 32), 3, 1, 2), 32), 32
    for out, units in ((64, 4), (128, 8), (256, 1)):
        for unit in range(units):
            x, into = b.pyramid(x, into, out, 1 if unit else 2), out
    x = b.node("Flatten", b.node("GlobalAveragePool", x))
    b.node("Gemm", x, b.weight(b.random.normal(0, 0.05, (into, 100))))
    return _written(b, "espnet", [1, 3, 256, 256], [1, 100], path)


def resnet50(path: Path, *, batch_norm: bool = False) -> Path:
    """Write a network of ResNet-50's shape (25.5 M parameters, 'input': N x 3 x 224 x 224)."""
    b = _Builder(batch_norm)
    x = b.node(
        "MaxPool",
        b.node("Relu", b.conv("input", (3, 64), 7, 2)),
        kernel_shape=[3, 3],
        strides=[2, 2],
        pads=[1] * 4,
    )
    into = 64
    for stage, (width, blocks) in enumerate(STAGES):
        for block in range(blocks):
            x = b.bottleneck(x, into, width, 2 if stage and not block else 1)
            into = 4 * width
    x = b.node("Flatten", b.node("GlobalAveragePool", x))
    b.node(
        "Gemm",
        x,
        b.weight(b.random.normal(0, 0.02, (into, 1000))),
        b.weight(np.zeros(1000)),
    )
    return _written(b, "resnet50", ["N", 3, 224, 224], ["N", 1000], path)


def _written(
    b: _Builder, name: str, size: list[int | str], scores: list[int | str], path: Path
) -> Path:
    b.nodes[-1].output[0] = "scores"
    graph = helper.make_graph(
        b.nodes,
        name,
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, size)],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, scores)],
        b.weights,
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path
