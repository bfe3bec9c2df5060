"""Types of the file's tensors, decided from shapes alone, and their bytes.

Bytes are computed on writing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch.exports.gguf import blocks
from quark_onnx.torch.exports.gguf.architectures import TargetTensor
from quark_onnx.torch.formats.quantized_tensor import Quantized, is_finite
from quark_onnx.torch.runtime.safetensors_header import StoredTensor

_FLOATS = {"F16": torch.float16, "F32": torch.float32}
#: The types that can be requested.
TYPES = (*blocks.FORMS, *_FLOATS)


@dataclass(frozen=True)
class Part:
    """Tensor of the file with its type and data.

    Attributes:
        target: the name and the checkpoint's tensors.
        type: GGUF's name of the type.
        given: codes or floats that replace checkpoint tensors, by name.
        order: indices of the source rows; None for no permutation.
        added: constant that is added to the values.
        reason: why the type is not the requested one; "" if it is.
    """

    target: TargetTensor
    type: str
    given: Mapping[str, Any]
    order: Any = None
    added: float = 0.0
    reason: str = ""

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in the file."""
        import gguf

        kind = gguf.GGMLQuantizationType[self.type]
        return math.prod(gguf.quant_shape_to_byte_shape(self.target.shape, kind))

    def data(self) -> Any:
        """Return the data to write: uint8, float16 or float32.

        Raises:
            ModelError: a tensor cannot be read, or its type cannot hold the values.
        """
        # The first axis of a stack counts the experts.
        arrays = [self._encoded(tensor) for tensor in self.target.sources]
        return np.stack(arrays) if self.target.stacked else arrays[0]

    def _encoded(self, stored: StoredTensor) -> Any:
        """Return the rows of one source in the type and the order of the file."""
        given = self.given.get(stored.name)
        if isinstance(given, Quantized) and self.type in blocks.FORMS:
            rows = blocks.store_codes(given, blocks.FORMS[self.type], stored.name)
        else:
            weight = stored.read() if given is None else given
            if isinstance(weight, Quantized):
                # The file has floats where the width does not fill blocks.
                weight = weight.dequantize()
            else:
                weight = weight.detach().cpu()
            rows = self._rounded(weight, stored.name)
        # rows are contiguous for all types
        return rows if self.order is None else rows[self.order]

    def _rounded(self, weight: torch.Tensor, name: str) -> Any:
        """Return floats in the type of the file, as blocks or as numbers."""
        # In float32, since 1 + weight would be rounded in 16 bits.
        if self.added:
            weight = weight.float() + self.added
        if self.type in blocks.FORMS:
            return blocks.round_blocks(weight, blocks.FORMS[self.type], name)
        short = weight.to(_FLOATS[self.type])
        # An infinity of the source is no overflow.
        if (
            not is_finite(short)
            and torch.isinf(short).any()
            and not torch.isinf(weight).any()
        ):
            raise ModelError(
                f"the tensor {name!r} holds values beyond those of {self.type}; ask"
                " for f32",
            )
        return short.numpy()


def typed(
    target: TargetTensor,
    given: Mapping[str, Any],
    kind: str,
    embeddings: str,
) -> tuple[str, str]:
    """Choose the type of a tensor.

    Args:
        target: the tensor.
        given: codes or floats by names of the checkpoint.
        kind: type of the weights of linear layers in decoder blocks.
        embeddings: type of other matrices.

    Returns:
        The type, and why it is not the requested one; "" if it is.

    Raises:
        ConfigError: the experts of a block have codes of different kinds.
        ModelError: no type supports the codes.
    """
    # llama.cpp has norms, biases and routers in float32.
    if len(target.sources[0].shape) == 1 or target.routes:
        return "F32", ""
    wanted = kind if target.in_block else embeddings
    # Parts of a model that its configuration gives a width of 0.
    if 0 in target.shape:
        return "F16", "it has no weights"
    # All experts of a stack have one type.
    types = set[str]()
    for stored in target.sources:
        codes = given.get(stored.name)
        if isinstance(codes, Quantized):
            types.add(blocks.form_of(codes, stored.name).name)
        else:
            types.add(wanted)
    if len(types) > 1:
        raise ConfigError(
            f"weights: the experts of {target.name!r} would be"
            f" {' and '.join(sorted(types))}; one is due",
        )
    (kind,) = types
    width = target.shape[-1]
    if kind in blocks.FORMS and width % blocks.SIZE:
        return (
            "F16",
            f"F16, not {kind}: a width of {width} is no multiple of {blocks.SIZE}",
        )
    return kind, ""
