"""Checks of layers that several layouts have in common: tensors, fused layers, exclusions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import filterfalse
from typing import NamedTuple

from quark_onnx.common.containers import grouped_by
from quark_onnx.torch.models.fused_groups import FUSED_NAMES
from quark_onnx.torch.runtime.safetensors_header import FLOATS, single_value
from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.fields import QUANTIZATION, is_positive
from quark_onnx.torch.validate.finding import REFUSED, WRONG, Finding
from quark_onnx.torch.validate.modules import (
    GATES,
    Module,
    fused_parts,
    shards,
    size_of,
    sizes_on_disk,
)
from quark_onnx.torch.validate.name_patterns import is_regular
from quark_onnx.torch.validate.rules import broken

Shape = tuple[int, ...]
#: Clients take a single scale in either shape.
SCALAR: tuple[Shape, ...] = ((), (1,))


@dataclass(frozen=True)
class Slot:
    """Requirement for a tensor.

    Attributes:
        types: allowed types, by the names of safetensors.
        shapes: allowed shapes; empty to allow every shape.
        needed: whether the tensor is required.
    """

    types: tuple[str, ...]
    shapes: tuple[Shape, ...]
    needed: bool = True


def slot(types: str | tuple[str, ...], *shapes: Shape, needed: bool = True) -> Slot:
    """Return the slot of a tensor, with the types and shapes that it may have.

    >>> slot("I32", (8, 4))
    Slot(types=('I32',), shapes=((8, 4),), needed=True)
    """
    return Slot((types,) if isinstance(types, str) else types, shapes, needed)


Slots = Mapping[str, Slot]
#: A single scale, in any float type.
SCALE = slot(FLOATS, *SCALAR)
OPTIONAL_SCALE = replace(SCALE, needed=False)
#: Names of fused projections to queries, keys and values.
FUSED = ("qkv_proj", "query_key_value", "Wqkv")
#: Scales below each projection: ``get_cache_scale`` of vLLM's configurations, and
#: ``maybe_remap_kv_scale_name`` in vllm/model_executor/model_loader/weight_utils.py.
_CACHED: dict[str, tuple[str, ...]] = {
    "q_proj": ("output_scale",),
    "k_proj": ("output_scale", "k_scale"),
    "v_proj": ("output_scale", "v_scale"),
    **dict.fromkeys(FUSED, ("output_scale", "k_scale", "v_scale")),
}


def cache_slots(module: Module) -> Slots:
    """Return the slots of KV cache scales below layers for queries, keys and values."""
    # optional: the rules of ``cache_in_vllm`` report a missing scale with its consequence
    return dict.fromkeys(_CACHED.get(module.last, ()), OPTIONAL_SCALE)


def slot_findings(module: Module, slots: Slots) -> Iterator[Finding]:
    """Yield missing tensors, wrong types or shapes, and unknown tensors of a layer.

    Args:
        module: the layer with its stored tensors.
        slots: requirements by the name of the tensor below the layer. A tensor without a slot is
            unknown, except a bias.
    """
    for name, slot in slots.items():
        place = f"{module.name}.{name}"
        tensor = module.tensors.get(name)
        if tensor is None:
            if slot.needed:
                yield broken("scale-missing", place, "there is no such tensor")
        # the shape first: with a wrong shape the type is of no use to the reader
        elif slot.shapes and tensor.shape not in slot.shapes:
            demanded = " or ".join(str(list(shape)) for shape in slot.shapes)
            text = f"the shape is {list(tensor.shape)}; it must be {demanded}"
            yield broken("tensor-shape", place, text)
        elif tensor.dtype not in slot.types:
            text = f"the type is {tensor.dtype}; it must be {' or '.join(slot.types)}"
            yield broken("tensor-type", place, text)
    # every layout stores a float bias under this name
    for name, tensor in module.tensors.items():
        if name not in slots and name != "bias":
            text = f"{tensor}, which the scheme does not have"
            yield broken("tensor-unknown", f"{module.name}.{name}", text)


def quantized_findings(
    checkpoint: Checkpoint,
    module: Module,
    size: Shape,
    slots: Slots,
    group: object = None,
) -> Iterator[Finding]:
    """Yield errors in the size and the tensors of a quantized layer.

    Args:
        checkpoint: the checkpoint.
        module: the layer.
        size: (out, in) of the layer, by the shape of its weight and its scheme.
        slots: requirements for the tensors.
        group: number of inputs with a common scale; any other value than a positive integer
            stands for no groups.
    """
    # without whole groups the shapes of all scales would be wrong as well; one finding is enough
    if is_positive(group) and size[1] % group:
        text = f"groups of {group}, and {size[1]} inputs"
        yield broken("group-divides", module.name, text)
        return
    yield from size_findings(module, size, size_of(module.name, checkpoint.text_config))
    yield from slot_findings(module, slots)


def size_findings(
    module: Module, shape: Shape, demanded: Shape | None
) -> Iterator[Finding]:
    """Yield a layer whose (out, in) differs from that of the configuration, if that is known."""
    if demanded is not None and shape != demanded:
        text = f"the layer has (out, in) = {shape}; config.json says {demanded}"
        yield broken("weight-shape", module.name, text, REFUSED)


def ceil_div(number: int, by: int) -> int:
    """Return the quotient, rounded up."""
    # integers throughout: a float quotient is inexact beyond 2**53
    return -(-number // by)


def excluded_findings(module: Module, text: str) -> Iterator[Finding]:
    """Yield an excluded layer with a quantized weight."""
    if module.is_quantized:
        yield broken("excluded-quantized", module.name, text)


def included_findings(
    module: Module, text: str, severity: str = ""
) -> Iterator[Finding]:
    """Yield a float layer without an exclusion."""
    # most exports leave routers float without an entry, and clients create float routers
    if not module.is_quantized and not module.is_router:
        yield broken("float-included", module.name, text, severity)


def listed_findings(
    module: Module, is_out: bool, if_out: str, if_in: str, severity: str = ""
) -> Iterator[Finding]:
    """Yield a layer that is quantized though a list excludes it, or float though none does.

    Args:
        module: the layer.
        is_out: whether the client keeps the layer float.
        if_out: text of the finding for an excluded layer.
        if_in: text of the finding for any other layer.
        severity: severity of the finding for any other layer; by default that of the rule.
    """
    if is_out:
        yield from excluded_findings(module, if_out)
    else:
        yield from included_findings(module, if_in, severity)


def expression_findings(patterns: Iterable[str]) -> Iterator[Finding]:
    """Yield entries of modules_to_not_convert that transformers cannot compile."""
    for pattern in filterfalse(is_regular, patterns):
        place = f"{QUANTIZATION}.modules_to_not_convert"
        text = f"{pattern!r} is no regular expression"
        yield broken("exclude-pattern", place, text, REFUSED)


def partial_findings(name: str, flags: Sequence[bool], what: str) -> Iterator[Finding]:
    """Yield a fused layer of which some parts are excluded or quantized, and others are not.

    Args:
        name: common name of the layers.
        flags: whether a layer is what the next argument says, for each layer.
        what: "quantized", or how the layers are excluded.
    """
    if any(flags) and not all(flags):
        text = f"{sum(flags)} of {len(flags)} are {what}"
        yield broken("shards-excluded", name, text)


def block_findings(
    checkpoint: Checkpoint, rows_of: Callable[[Module], object]
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
    """Return the number of outputs of a layer, or of each part on disk, that other outputs follow.

    The other outputs are of a layer that vLLM fuses with this one, or of the same expert.
    """
    outputs = module.matrix.shape[0]
    if module.experts:
        return [outputs] if module.last in GATES else []
    _, parts = fused_parts(module, checkpoint.modules)
    if module.name in parts[:-1]:
        return [outputs]
    return sizes_on_disk(module, outputs, checkpoint.text_config)[:-1]


class PackedOutputs(NamedTuple):
    """Values that are packed along the outputs of a layer.

    Attributes:
        outputs: number of values.
        bits: number of bits of a value.
        what: name of the values in findings.
    """

    outputs: int
    bits: int
    what: str


def packed_output_findings(
    checkpoint: Checkpoint, outputs_of: Callable[[Module], PackedOutputs | None]
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
        is_stored_fused = module.last in FUSED_NAMES
        if not is_stored_fused and not _is_fused(checkpoint, module):
            continue
        packed = outputs_of(module)
        if packed is None:
            continue
        outputs, bits, what = packed
        if is_stored_fused:
            sizes = sizes_on_disk(module, outputs, checkpoint.text_config)
            if any(size * bits % 32 for size in sizes):
                text = (
                    f"it is split into {', '.join(map(str, sizes))} {what} of"
                    f" {bits} bits, which end within an int32"
                )
                yield broken("packed-outputs", module.name, text)
        elif outputs * bits % 32:
            text = (
                f"{outputs} {what} of {bits} bits end within an"
                " int32, and the layer is fused with others"
            )
            severity = REFUSED if module.experts else WRONG
            yield broken("packed-outputs", module.name, text, severity)


def _is_fused(checkpoint: Checkpoint, module: Module) -> bool:
    """Return whether vLLM fuses a layer with others, within a block or an expert."""
    if module.experts:
        return module.last in GATES
    return bool(fused_parts(module, checkpoint.modules)[1])


def global_scale_findings(
    checkpoint: Checkpoint, weight_scale: str, input_scale: str = ""
) -> Iterator[Finding]:
    """Yield NVFP4 layers that are fused, and have different global scales.

    vLLM takes the greatest scale for all codes of a fused layer, and that of the gate for the codes
    of an expert's gate and up layers.

    Args:
        checkpoint: the checkpoint.
        weight_scale: name of the global scale of a weight.
        input_scale: name of that of the inputs, if vLLM takes one that may be too small; experts
            have the greatest scale of their inputs.
    """
    for name, modules in shards(checkpoint.modules):
        yield from _differing_findings(name, modules, weight_scale)
        if input_scale:
            yield from _differing_findings(name, modules, input_scale)
    gates = [
        module
        for module in checkpoint.linears
        if module.experts and module.last in GATES
    ]
    for expert, modules in grouped_by(gates, lambda module: module.parent).items():
        lasts = ",".join(module.last for module in modules)
        yield from _differing_findings(f"{expert}.{{{lasts}}}", modules, weight_scale)


def _differing_findings(
    name: str, modules: list[Module], scale: str
) -> Iterator[Finding]:
    """Yield a fused layer whose parts have different global scales of a name."""
    # int4_fp8 has a second scale for each output: single_value returns None, which drops out
    tensors = [module.tensors[scale] for module in modules if scale in module.tensors]
    values = [value for value in map(single_value, tensors) if value is not None]
    # an unusable scale has a finding of its own
    if not values or not all(0 < value < math.inf for value in values):
        return
    # vLLM compares the scales of an expert by ``torch.allclose``, whose tolerance this is
    if max(values) - min(values) > 1e-5 * abs(max(values)):
        text = ", ".join(f"{value:.6g}" for value in values)
        yield broken("nvfp4-scales-differ", name, text)
