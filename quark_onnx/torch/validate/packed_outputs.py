"""Outputs packed in int32 that do not fill the last int32 of a layer that vLLM fuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quark_onnx.torch.models.fused_groups import FUSED_NAMES
from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.finding import REFUSED, WRONG, Finding
from quark_onnx.torch.validate.modules import (
    GATES,
    Module,
    fused_parts,
    sizes_on_disk,
)
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

    def fill_words(self, count: int) -> bool:
        """Return whether a number of values fills whole int32."""
        return count * self.bits % _WORD == 0


def packed_output_findings(
    checkpoint: Checkpoint,
    outputs_of: Callable[[Module], PackedOutputs | None],
) -> Iterator[Finding]:
    """Yield parts of fused layers whose packed outputs end within an int32.

    ``_adjust_shard_indexes_for_packing`` in vllm/model_executor/parameter.py of vLLM 0.33 rounds
    the size and the place of a part down to whole int32: the last outputs of the part are dropped,
    and later parts are put on its other outputs. The same holds for the parts of a layer that is
    stored fused. Experts have room for half of the int32 of both parts, which the copy of a longer
    part does not fit.

    Tensor parallelism divides each part first, so that the values of every GPU must fill int32. The
    number of GPUs is not known here: findings are those of a single one.

    Args:
        checkpoint: the checkpoint.
        outputs_of: function that returns the packed outputs of a layer; None for a layer without.
    """
    for module in checkpoint.quantized_linears:
        if module.last in FUSED_NAMES:
            yield from _split_findings(checkpoint, module, outputs_of(module))
        elif _is_fused(checkpoint, module):
            yield from _part_findings(module, outputs_of(module))


def _split_findings(
    checkpoint: Checkpoint,
    module: Module,
    packed: PackedOutputs | None,
) -> Iterator[Finding]:
    """Yield a layer that is stored fused, and has a part that ends within an int32."""
    if packed is None:
        return
    sizes = sizes_on_disk(module, packed.count, checkpoint.text_config)
    if not all(map(packed.fill_words, sizes)):
        text = (
            f"it is split into {', '.join(map(str, sizes))} {packed.what} of"
            f" {packed.bits} bits, which end within an int32"
        )
        yield broken("packed-outputs", module.name, text)


def _part_findings(module: Module, packed: PackedOutputs | None) -> Iterator[Finding]:
    """Yield a part of a fused layer that ends within an int32."""
    if packed is not None and not packed.fill_words(packed.count):
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
