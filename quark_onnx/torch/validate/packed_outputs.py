"""Outputs packed in int32 that do not fill the last int32 of a layer that vLLM fuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.finding import REFUSED, WRONG, Finding
from quark_onnx.torch.validate.modules import GATES, Module, fused_parts
from quark_onnx.torch.validate.rules import broken

#: Bits of an int32.
_WORD = 32


@dataclass(frozen=True)
class PackedOutputs:
    """Values of a layer that are packed along its outputs.

    Attributes:
        count: number of outputs.
        bits: number of bits of a value.
        what: name of the values in findings.
    """

    count: int
    bits: int
    what: str

    @property
    def fill_words(self) -> bool:
        """Whether the values fill whole int32."""
        return self.count * self.bits % _WORD == 0


def packed_output_findings(
    checkpoint: Checkpoint,
    outputs_of: Callable[[Module], PackedOutputs | None],
) -> Iterator[Finding]:
    """Yield parts of fused layers whose packed outputs end within an int32.

    ``_adjust_shard_indexes_for_packing`` in vllm/model_executor/parameter.py of vLLM 0.33 rounds
    the size and the place of a part down to whole int32: the last outputs of the part are dropped,
    and later parts are put on its other outputs. Experts have room for half of the int32 of both
    parts, which the copy of a longer part does not fit.

    Args:
        checkpoint: the checkpoint.
        outputs_of: function that returns the packed outputs of a layer; None for a layer without.
    """
    for module in checkpoint.quantized_linears:
        if not _is_fused(checkpoint, module):
            continue
        packed = outputs_of(module)
        if packed is not None and not packed.fill_words:
            text = (
                f"{packed.count} {packed.what} of {packed.bits} bits end within an"
                " int32, and the layer is fused with others"
            )
            severity = REFUSED if module.experts else WRONG
            yield broken("packed-outputs", module.name, text, severity)


def _is_fused(checkpoint: Checkpoint, module: Module) -> bool:
    """Return whether vLLM fuses a layer with others, within a block or an expert."""
    if module.experts:
        return module.last in GATES
    _, parts = fused_parts(module, checkpoint.modules)
    return bool(parts)
