"""Stored activations: codes and scale if they determine the tensor, else the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.optimizers.problem import Floats
from quark_onnx.refine.layer_stream import LayerStream

#: Integer types of numpy that float32 represents exactly.
_CODES = frozenset({"uint8", "int8", "uint16", "int16"})


@dataclass(frozen=True)
class StoredActivation:
    """A tensor of a segment-wise inference, and its storage.

    Attributes:
        name: name of the stored tensor or of its codes.
        scale: scale of the codes; None for a stored tensor.
        zero: the code of 0.
    """

    name: str
    scale: np.float32 | None = None
    zero: int = 0

    def values(self, kept: NDArray[Any]) -> Floats:
        """Return the values of the tensor, dequantized as onnxruntime does.

        Args:
            kept: stored codes in any shape, or values of a stored tensor, which are returned
                uncopied.
        """
        if self.scale is None:
            return kept
        values = kept.astype(np.float32)
        # In place on the new array; a zero point of 0 saves a pass.
        if self.zero:
            values -= np.float32(self.zero)
        values *= self.scale
        return values


def store_activation(walk: LayerStream, tensor: str) -> StoredActivation:
    """Return the best, or the existing, storage of a quantized graph's tensor.

    Args:
        walk: inference of the quantized graph; no segment is run.
        tensor: name of the tensor, as a layer reads it.

    Returns:
        Codes, scale and zero point of a per-tensor DequantizeLinear; the tensor itself for any
        other producer, or if the tensor has been computed already.
    """
    graph = walk.graph
    node = graph.producer(tensor)
    if (
        # The tensor itself is stored already: another layer has asked for it.
        walk.known(tensor)
        or node is None
        or node.op_type != "DequantizeLinear"
        or node.domain not in ("", "ai.onnx", "com.microsoft")
    ):
        return StoredActivation(tensor)
    codes = node.inputs[0]
    scale = graph.constant(node.inputs[1])
    zero = graph.constant(node.input(2))
    single = scale is not None and scale.dtype == np.float32 and scale.size == 1
    # Only per-tensor codes that float32 holds exactly give the same values as onnxruntime.
    if (
        not single
        or zero is None
        or zero.dtype.name not in _CODES
        or graph.is_constant(codes)
    ):
        return StoredActivation(tensor)
    assert scale is not None
    return StoredActivation(codes, np.float32(scale.reshape(())), int(zero.reshape(())))
