"""Values of scales: NaN, infinities, zeros and negative numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.finding import WARNING, WRONG, Finding
from quark_onnx.torch.validate.header import FLOATS, Tensor, raw_values_of, values_of
from quark_onnx.torch.validate.modules import Module
from quark_onnx.torch.validate.rules import broken

#: Scales of weights, activations, outputs and the KV cache, in any layout; ``_2`` is the second
#: stage, ``_inv`` DeepSeek's name, ``_global`` the name of compressed-tensors, and "scales" that of
#: AutoAWQ and GPTQ.
_SCALE = re.compile(
    r"(weight|input|activation|output|prob_output|[kvq]|kv)(_global)?_scale(_2|_inv)?|scales",
)
#: Bits that are all set in NaN and infinities, and in no number, by type. U8 holds the exponents
#: of MX formats.
_NOT_FINITE = {
    "F32": 0x7F800000,
    "F16": 0x7C00,
    "BF16": 0x7F80,
    "F8_E4M3": 0x7F,
    "F8_E5M2": 0x7C,
    "F8_E8M0": 0xFF,
    "U8": 0xFF,
}
#: Most bytes of scales of groups and blocks that are read: those of a model with 70B parameters in
#: 4 bits. Of more scales, every second tensor is read, or every third and so on.
_MOST_BYTES = 2**30


def value_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield scales that are NaN or infinite, and single scales of 0 or less."""
    matrices = list[Tensor]()
    for module in checkpoint.modules.values():
        for name, tensor in module.tensors.items():
            if not _SCALE.fullmatch(name) or tensor.planned:
                continue
            if _is_float_vector(tensor):
                yield from _vector_findings(module, name, tensor)
            elif tensor.dtype in _NOT_FINITE:
                matrices.append(tensor)
    bytes_in_all = sum(tensor.size for tensor in matrices)
    step = -(-bytes_in_all // _MOST_BYTES)
    for tensor in matrices[:: max(step, 1)]:
        yield from _matrix_findings(tensor)


def _vector_findings(module: Module, name: str, tensor: Tensor) -> Iterator[Finding]:
    """Yield a scale of a layer or of its outputs with unusable values.

    Args:
        module: the layer of the scale.
        name: name of the tensor below the layer.
        tensor: a float scalar or vector, whose values are read from the file.

    Yields:
        At most one finding, with the first unusable value. Infinities and NaN are unusable
        anywhere, values of 0 or less only in a tensor of one value.
    """
    values = values_of(tensor)
    # of several scales some may be 0, as for outputs whose weights are all 0
    usable = np.isfinite(values)
    if tensor.count == 1:
        usable &= values > 0
    if usable.all():
        return
    # one finding for each tensor, with the first bad value
    wrong = values[~usable][0]
    severity = WRONG
    if wrong == 0 and module.experts and name.startswith("input"):
        # clients take the greatest scale of the experts, so that a zero has no effect
        severity = WARNING
    text = f"it is {wrong:g}, in {tensor.file.name}"
    yield broken("scale-value", tensor.name, text, severity)


def _matrix_findings(tensor: Tensor) -> Iterator[Finding]:
    """Yield scales of groups or blocks of which some are NaN or infinite."""
    count = 0
    for part in raw_values_of(tensor):
        mask = part.dtype.type(_NOT_FINITE[tensor.dtype])
        count += np.count_nonzero((part & mask) == mask)
    if count:
        text = f"{count} of {tensor.count} are NaN or infinite, in {tensor.file.name}"
        yield broken("scale-value", tensor.name, text)


def _is_float_vector(tensor: Tensor) -> bool:
    """Return whether a tensor has floats, and at most one axis."""
    return tensor.dtype in FLOATS and len(tensor.shape) <= 1 and tensor.count > 0
