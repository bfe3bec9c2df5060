"""BiasAbsorption: what a Relu always lets pass need not pass it (Nagel et al. 2019, "Data-Free
Quantization Through Weight Equalization and Bias Correction", section 4.1.3).

Where a channel in front of a Relu never falls below c > 0, its bias may be lowered by c, and the
layers behind, which read c less, get it back in their own biases: the range of the tensor between
them is smaller by c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from calibrators import MinMax
from calibrators.onnx_runtime.control_flow import Observation
from quark_onnx.graph import Graph, Node
from quark_onnx.kernels.noise import EIGHT_BITS, Rounding
from quark_onnx.optimizers.base import Samples, register, require_number, watch
from quark_onnx.patterns.conv_and_gemm import Layer

_UNPADDED = ("NOTSET", "VALID")


@register
@dataclass(frozen=True)
class BiasAbsorption:
    """Moves what a Relu always lets pass into the biases behind it.

    On the data the model computes the same.

    It is for layers behind CLE, which leaves large biases to channels with small weights. Layers
    that pad their input with zeros read less at the edges and are left alone.

    Attributes:
        margin: so much of the least value that was seen stays, for what other data may bring.
    """

    name: ClassVar[str] = "bias_absorption"
    stage: ClassVar[str] = "float"
    judged: ClassVar[bool] = True
    needs_data: ClassVar[bool] = True
    reads_data: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    margin: float = 0.1

    def __post_init__(self) -> None:
        require_number(self, "margin", least=0, most=1)

    def __call__(
        self,
        graph: Graph,
        samples: Samples = (),
        rounding: Rounding = EIGHT_BITS,
    ) -> int:
        """Absorb in place; how many tensors between layers.

        Raises:
            DataError: a sample that does not fit or cannot be run.
        """
        found = [
            pair for node in graph.nodes if (pair := _pair(graph, node)) is not None
        ]
        if not found or not len(samples):
            return 0
        tensors = [
            Observation(first.node.outputs[0], MinMax(), 1) for first, _ in found
        ]  # channels come second
        seen = watch(graph, tensors, samples)
        return sum(
            self._absorb(
                graph,
                first,
                readers,
                statistic.lo if not statistic.nonfinite else np.zeros(0),
            )
            for (first, readers), statistic in zip(found, seen, strict=True)
        )

    def _absorb(
        self,
        graph: Graph,
        first: Layer,
        readers: list[Layer],
        least: NDArray[np.float64],
    ) -> bool:
        bias = first.bias(graph)
        if bias is None or least.size != bias.size or not (least > 0).any():
            return False
        moved = np.maximum(least, 0.0) * (1 - self.margin)
        first.set_bias(graph, bias - moved, "absorbed")
        for reader in readers:
            own, weight = reader.bias(graph), reader.weight(graph)
            assert own is not None
            taken = weight.reshape(*weight.shape[:3], -1).sum(axis=3)
            back = np.einsum("goi,gi->go", taken, moved.reshape(weight.shape[0], -1))
            reader.set_bias(graph, own + back.reshape(-1), "absorbed")
        return True


def _pair(graph: Graph, node: Node) -> tuple[Layer, list[Layer]] | None:
    """A layer, and the layers that alone read it through a Relu."""
    first, result = Layer.of(graph, node), node.outputs[0]
    if (
        first is None
        or node.kind == "MatMul"
        or _pinned(graph, result)
        or first.bias(graph) is None
    ):
        return None
    readers = graph.consumers(result)
    if [reader.kind for reader in readers] != ["Relu"] or _pinned(
        graph,
        readers[0].outputs[0],
    ):
        return None
    passed = readers[0].outputs[0]
    layers = [Layer.of(graph, reader) for reader in graph.consumers(passed)]
    known = [
        layer for layer in layers if layer is not None and _takes(graph, layer, passed)
    ]
    return (first, known) if layers and len(known) == len(layers) else None


def _pinned(graph: Graph, tensor: str) -> bool:
    return graph.is_output(tensor) or graph.captured(tensor)


def _takes(graph: Graph, layer: Layer, tensor: str) -> bool:
    """Whether a layer reads a tensor without zeros around it, and has a place for a bias."""
    node = layer.node
    if (
        node.kind not in ("Conv", "Gemm")
        or node.inputs.count(tensor) != 1
        or node.input(0) != tensor
    ):
        return False
    padded = (
        any(node.attribute("pads", ()))
        or node.attribute("auto_pad", "NOTSET") not in _UNPADDED
    )
    return layer.bias(graph) is not None and not (node.kind == "Conv" and padded)
