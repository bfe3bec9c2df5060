"""Blocks of fp8 weights that reach over the end of a layer that vLLM fuses with the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.fields import is_positive
from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.modules import GATES, Module, fused_parts
from quark_onnx.torch.validate.rules import broken


def block_findings(
    checkpoint: Checkpoint,
    rows_of: Callable[[Module], object],
) -> Iterator[Finding]:
    """Yield fused layers that end within a block; the last part of a fused layer may.

    ``validate_fp8_block_shape`` and ``validate_fp8_block_shape_moe`` in
    vllm/model_executor/layers/quantization/utils/fp8_utils.py of vLLM 0.33, for any layout: the
    next part begins with new scales.

    Args:
        checkpoint: the checkpoint.
        rows_of: function that returns the number of outputs of a layer's blocks; any other value
            than a positive integer stands for no blocks.
    """
    for module in checkpoint.quantized_linears:
        if not _is_followed(checkpoint, module):
            continue
        rows, weight = rows_of(module), module.weight
        # Linear layers have a weight
        assert weight is not None
        if is_positive(rows) and weight.shape[0] % rows:
            text = (
                f"blocks of {rows}, and {weight.shape[0]} outputs,"
                " behind which others are fused"
            )
            yield broken("group-divides", module.name, text)


def _is_followed(checkpoint: Checkpoint, module: Module) -> bool:
    """Return whether vLLM fuses a layer with one behind it, or both are of an expert."""
    if module.experts:
        return module.last in GATES
    _, parts = fused_parts(module, checkpoint.modules)
    return module.name in parts[:-1]
