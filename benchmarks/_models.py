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
    b.nodes[-1].output[0] = "scores"
    graph = helper.make_graph(
        b.nodes,
        "resnet50",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 3, 224, 224])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 1000])],
        b.weights,
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path
