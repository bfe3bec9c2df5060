"""Blocks of fp8 weights that reach over the end of a layer that vLLM fuses with the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.fields import is_positive
from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.modules import (
    GATES,
    Module,
    fused_parts,
    sizes_on_disk,
)
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
        followed = _followed(checkpoint, module)
        rows = rows_of(module) if followed else None
        if is_positive(rows) and any(size % rows for size in followed):
            text = (
                f"blocks of {rows}, and {', '.join(map(str, followed))} outputs,"
                " behind which others are fused"
            )
            yield broken("group-divides", module.name, text)


def _followed(checkpoint: Checkpoint, module: Module) -> list[int]:
    """Return the numbers of outputs that others follow, of a layer or of its parts on disk.

    Others are of a layer that vLLM fuses with this one, or of the same expert.
    """
    # Linear layers have a weight
    assert module.weight is not None
    outputs = module.weight.shape[0]
    if module.experts:
        return [outputs] if module.last in GATES else []
    _, parts = fused_parts(module, checkpoint.modules)
    if module.name in parts[:-1]:
        return [outputs]
    return sizes_on_disk(module, outputs, checkpoint.text_config)[:-1]
