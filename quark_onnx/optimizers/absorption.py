"""BiasAbsorption: lower the range of activations that a Relu never clips.

Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section
4.1.3. If a channel before a Relu never falls below c > 0, its bias may be lowered by c, and the
next layers, which read c less, get it back in their own biases: the range of the tensor between
them shrinks by c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from calibrators import MinMax
from calibrators.onnx_runtime.control_flow import Observation
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.constant_input import private
from quark_onnx.graph.matching import only_use
from quark_onnx.kernels.noise import EIGHT_BITS, Rounding
from quark_onnx.optimizers.base import (
    FloatOptimizer,
    Samples,
    register,
    require_number,
    watch,
)
from quark_onnx.patterns.conv_and_gemm import Layer, is_padded, reads_activation


@register
@dataclass(frozen=True)
class BiasAbsorption(FloatOptimizer):
    """Moves the constant part of positive activations into the biases of the next layers.

    On the calibration data the model computes the same. Useful after CLE, which leaves large biases
    to channels with small weights. Layers with zero padding read less at the edges and are left
    alone.

    Attributes:
        margin: share of the least observed value that stays, for other data.
    """

    name: ClassVar[str] = "bias_absorption"
    needs_data: ClassVar[bool] = True

    margin: float = 0.1

    def __post_init__(self) -> None:
        require_number(self, "margin", least=0, most=1)

    def __call__(
        self,
        graph: Graph,
        samples: Samples = (),
        rounding: Rounding = EIGHT_BITS,
    ) -> int:
        """Absorb biases in place; return the number of tensors between layers.

        Raises:
            DataError: a sample does not fit or cannot be run.
        """
        # One pass measures all pairs: absorbing in one pair leaves the outputs of its readers as
        # they are.
        candidates = [_pair(graph, node) for node in graph.nodes]
        pairs = [pair for pair in candidates if pair is not None]
        if not pairs or not len(samples):
            return 0
        # Axis 1 has the channels of images and of matrices alike.
        tensors = [
            Observation(first.node.outputs[0], MinMax(), axis=1) for first, _ in pairs
        ]
        statistics = watch(graph, tensors, samples)
        count = 0
        for (first, readers), statistic in zip(pairs, statistics, strict=True):
            # The least of values that were left out as NaN or infinite bounds nothing.
            if not statistic.nonfinite:
                count += self._absorb(graph, first, readers, statistic.lo)
        return count

    def _absorb(
        self,
        graph: Graph,
        first: Layer,
        readers: list[Layer],
        least: NDArray[np.float64],
    ) -> bool:
        """Move the constant part of a layer's outputs into the biases of its readers.

        Return whether a bias was changed.

        Args:
            first: the layer before the Relu.
            readers: all readers of the Relu.
            least: least value of each output before the Relu, (outputs,).
        """
        bias = first.bias(graph)
        # Only channels that stay positive on all data have a constant part.
        if bias is None or least.size != bias.size or not (least > 0).any():
            return False
        # The margin keeps other data above zero: what the Relu clips cannot be given back.
        moved = np.maximum(least, 0.0) * (1 - self.margin)
        first.set_bias(graph, bias - moved, "absorbed")
        for reader in readers:
            bias_after = reader.bias(graph)
            weight = reader.weight(graph)
            assert bias_after is not None
            # Without padding, a constant input contributes its value times the sum of the kernel.
            summed = weight.reshape(*weight.shape[:3], -1).sum(axis=3)
            # (groups, outputs / groups) from (groups, outputs / groups, inputs / groups) and
            # (groups, inputs / groups).
            by_group = moved.reshape(weight.shape[0], -1)
            restored = np.einsum("goi,gi->go", summed, by_group).reshape(-1)
            reader.set_bias(graph, bias_after + restored, "absorbed")
        return True


def _pair(graph: Graph, node: Node) -> tuple[Layer, list[Layer]] | None:
    """Return a layer, and the readers through a Relu; None with further readers."""
    first = Layer.of(graph, node)
    # The bias of a MatMul is an Add of its own, behind which the Relu is.
    if first is None or node.kind == "MatMul" or first.bias(graph) is None:
        return None
    relu = only_use(graph, node.outputs[0], "Relu")
    # Every reader of the Relu must get back what is taken away; outside readers cannot.
    if relu is None or not private(graph, relu.outputs[0]):
        return None
    readers = list[Layer]()
    for reader in graph.consumers(relu.outputs[0]):
        layer = Layer.of(graph, reader)
        if layer is None or not _takes(graph, layer, relu.outputs[0]):
            return None
        readers.append(layer)
    return (first, readers) if readers else None


def _takes(graph: Graph, layer: Layer, tensor: str) -> bool:
    """Return whether a layer reads a tensor without zero padding, and can have a bias."""
    node = layer.node
    if node.kind not in ("Conv", "Gemm") or not reads_activation(node, tensor):
        return False
    if node.kind == "Conv" and is_padded(node):
        return False
    return layer.bias(graph) is not None
