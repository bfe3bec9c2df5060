"""The type of each tensor of the file, decided from shapes alone.

And its bytes, computed when it is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quark_onnx.errors import ConfigError, ModelError
from quark_onnx.torch.checkpoints.safetensors_io import StoredTensor
from quark_onnx.torch.exports.gguf import blocks
from quark_onnx.torch.exports.gguf.architectures import Target
from quark_onnx.torch.formats.quantized_tensor import Quantized

_FLOATS = {"F16": torch.float16, "F32": torch.float32}
#: The types that can be asked for.
TYPES = (*blocks.FORMS, *_FLOATS)


@dataclass(frozen=True)
class Part:
    """A tensor of the file.

    Attributes:
        target: what it is.
        type: as GGUF calls it.
        given: what stands in for tensors of the checkpoint, by their names: codes, or floats.
        order: where its rows come from; None where they stay.
        added: to its values.
        reason: why the type is not the one that was asked for; "" where it is.
    """

    target: Target
    type: str
    given: Mapping[str, Any]
    order: Any = None
    added: float = 0.0
    reason: str = ""

    @property
    def nbytes(self) -> int:
        """Of the tensor in the file."""
        import gguf

        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type]]
        return math.prod(self.target.shape) // int(values) * int(size)

    def data(self) -> Any:
        """What is written: uint8, float16 or float32.

        Raises:
            ModelError: a tensor cannot be read, or holds what its type does not.
        """
        each = [self._encoded(stored) for stored in self.target.sources]
        return np.stack(each) if self.target.stacked else each[0]

    def _encoded(self, stored: StoredTensor) -> Any:
        given = self.given.get(stored.name)
        if isinstance(given, Quantized) and self.type in blocks.FORMS:
            rows = blocks.store_codes(given, blocks.FORMS[self.type], stored.name)
        else:
            weight = stored.read() if given is None else given
            weight = (
                weight.dequantize()
                if isinstance(weight, Quantized)
                else weight.detach().cpu()
            )
            rows = self._rounded(weight, stored.name)
        # rows are stored one after the other, whatever the type
        return rows if self.order is None else rows[self.order]

    def _rounded(self, weight: Any, name: str) -> Any:
        if self.added:
            weight = weight.float() + self.added
        if self.type in blocks.FORMS:
            return blocks.round_blocks(weight, blocks.FORMS[self.type], name)
        short = weight.to(_FLOATS[self.type])
        if torch.isinf(short).any() and not torch.isinf(weight).any():
            raise ModelError(
                f"the tensor {name!r} holds values beyond those of {self.type}; ask"
                " for f32",
            )
        return short.numpy()


def typed(
    target: Target,
    given: Mapping[str, Any],
    kind: str,
    embeddings: str,
) -> tuple[str, str]:
    """The type of a tensor, and why it is not the one that was asked for; "" where it is.

    Args:
        target: the tensor.
        given: codes or floats by names of the checkpoint.
        kind: of the weights of linear layers in decoder blocks.
        embeddings: of other matrices.

    Raises:
        ConfigError: the experts of a block have codes of different kinds.
        ModelError: codes have no place in any type.
    """
    if len(target.sources[0].shape) == 1 or target.routes:
        return "F32", ""
    wanted = kind if target.in_block else embeddings
    forms = [given.get(stored.name) for stored in target.sources]
    types = {
        (
            blocks.form_of(codes, stored.name).name
            if isinstance(codes, Quantized)
            else wanted
        )
        for stored, codes in zip(target.sources, forms, strict=True)
    }
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
