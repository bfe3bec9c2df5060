"""Stored activations: integer codes and a scale where these determine the tensor, the tensor itself
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.optimizers.problem import Floats
from quark_onnx.refine.layer_stream import LayerStream

#: Codes that numpy has, and that float32 holds.
_CODES = frozenset({"uint8", "int8", "uint16", "int16"})


@dataclass(frozen=True)
class StoredActivation:
    """A tensor that a walk reaches, and how to read it.

    Attributes:
        name: of what is kept, the tensor itself or its codes.
        scale: of the codes; None where it is the tensor itself.
        zero: the code of 0.
    """

    name: str
    scale: np.float32 | None = None
    zero: int = 0

    def values(self, kept: NDArray[Any]) -> Floats:
        """The values of the tensor, as onnxruntime computes them from the codes."""
        if self.scale is None:
            return kept
        values = kept.astype(np.float32)
        if self.zero:
            values -= np.float32(self.zero)
        values *= self.scale
        return values


def store_activation(walk: LayerStream, tensor: str) -> StoredActivation:
    """How a tensor of a quantized graph is best kept, or is kept already."""
    graph = walk.graph
    node = graph.producer(tensor)
    if (
        walk.known(tensor)
        or node is None
        or node.op_type != "DequantizeLinear"
        or node.domain not in ("", "ai.onnx", "com.microsoft")
    ):
        return StoredActivation(tensor)
    codes = node.inputs[0]
    scale = graph.constant(node.inputs[1])
    zero = graph.constant(node.inputs[2]) if node.input(2) else None
    single = scale is not None and scale.dtype == np.float32 and scale.size == 1
    if (
        not single
        or zero is None
        or zero.dtype.name not in _CODES
        or graph.is_constant(codes)
    ):
        return StoredActivation(tensor)
    assert scale is not None
    return StoredActivation(codes, np.float32(scale.reshape(())), int(zero.reshape(())))
