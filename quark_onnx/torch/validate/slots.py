"""Slots: requirements for the tensors of a quantized layer, and violations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quark_onnx.common.containers import without
from quark_onnx.torch.validate.fields import QUANTIZATION, is_names, is_positive
from quark_onnx.torch.validate.finding import REFUSED, Finding
from quark_onnx.torch.validate.header import FLOATS, Tensor
from quark_onnx.torch.validate.modules import Module
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


Slots = Mapping[str, Slot]
#: A single scale, in any float type.
SCALE = Slot(FLOATS, SCALAR)
#: Names of fused projections to queries, keys and values.
FUSED = ("qkv_proj", "query_key_value", "Wqkv")
_BOTH = ("output_scale", "k_scale", "v_scale")
#: Scales below each projection: ``get_cache_scale`` of vLLM's configurations, and
#: ``maybe_remap_kv_scale_name`` in vllm/model_executor/model_loader/weight_utils.py.
_CACHED: dict[str, tuple[str, ...]] = {
    "q_proj": ("output_scale",),
    "k_proj": ("output_scale", "k_scale"),
    "v_proj": ("output_scale", "v_scale"),
    **dict.fromkeys(FUSED, _BOTH),
}


def cache_slots(module: Module) -> Slots:
    """Return the slots of KV cache scales below layers for queries, keys and values.

    vLLM finds the scales there.
    """
    # optional: the rules of ``cache_in_vllm`` report a missing scale with its consequence
    return dict.fromkeys(_CACHED.get(module.last, ()), replace(SCALE, needed=False))


def floats(*shapes: Shape) -> Slot:
    """Return a slot for scales of the given shapes, in any float type."""
    return Slot(FLOATS, shapes)


def slot_findings(module: Module, slots: Slots) -> Iterator[Finding]:
    """Yield missing tensors, wrong types or shapes, and unknown tensors of a layer.

    Args:
        module: the layer with its stored tensors.
        slots: requirements by the name of the tensor below the layer. A tensor without a slot is
            unknown, except a bias.
    """
    for name, slot in slots.items():
        place = f"{module.name}.{name}"
        if name in module.tensors:
            yield from _tensor_findings(place, module.tensors[name], slot)
        elif slot.needed:
            yield broken("scale-missing", place, "there is no such tensor")
    # every layout stores a float bias under this name
    for name, tensor in without(module.tensors, {*slots, "bias"}).items():
        text = f"{tensor}, which the scheme does not have"
        yield broken("tensor-unknown", f"{module.name}.{name}", text)


def _tensor_findings(place: str, tensor: Tensor, slot: Slot) -> Iterator[Finding]:
    """Yield a tensor of a wrong shape, or else of a wrong type.

    Args:
        place: place for the finding.
        tensor: the stored tensor.
        slot: its requirement; a slot without shapes accepts every shape.
    """
    # the shape first: with a wrong shape the type is of no use to the reader
    if slot.shapes and tensor.shape not in slot.shapes:
        demanded = " or ".join(str(list(shape)) for shape in slot.shapes)
        text = f"the shape is {list(tensor.shape)}; it must be {demanded}"
        yield broken("tensor-shape", place, text)
    elif tensor.dtype not in slot.types:
        text = f"the type is {tensor.dtype}; it must be {' or '.join(slot.types)}"
        yield broken("tensor-type", place, text)


def quantized_findings(
    module: Module,
    size: Shape,
    demanded: Shape | None,
    slots: Slots,
    group: object = None,
) -> Iterator[Finding]:
    """Yield errors in the size and the tensors of a quantized layer.

    Args:
        module: the layer.
        size: (out, in) of the layer, by the shape of its weight and its scheme.
        demanded: (out, in) by the configuration; None if unknown.
        slots: requirements for the tensors.
        group: number of inputs with a common scale; any other value than a positive integer
            stands for no groups.
    """
    # without whole groups the shapes of all scales would be wrong as well; one finding is enough
    if is_positive(group) and size[1] % group:
        text = f"groups of {group}, and {size[1]} inputs"
        yield broken("group-divides", module.name, text)
        return
    yield from size_findings(module, size, demanded)
    yield from slot_findings(module, slots)


def size_findings(
    module: Module,
    found: Shape,
    demanded: Shape | None,
) -> Iterator[Finding]:
    """Yield a layer whose size differs from the model's configuration.

    Args:
        module: the layer.
        found: (out, in) of the layer, by the shape of its weight and its scheme.
        demanded: (out, in) by the configuration; None if unknown.
    """
    if demanded is not None and found != demanded:
        text = f"the layer has (out, in) = {found}; config.json says {demanded}"
        yield broken("weight-shape", module.name, text, REFUSED)


def name_list_findings(entries: Mapping[str, Any], key: str) -> Iterator[Finding]:
    """Yield an exclusion entry that is not a list of names.

    Args:
        entries: the quantization_config.
        key: key of the list; a missing key or null is no error.
    """
    found = entries.get(key)
    if found is not None and not is_names(found):
        text = f"{found!r}, and not a list of names"
        yield broken("malformed", f"{QUANTIZATION}.{key}", text)


def ceil_div(number: int, by: int) -> int:
    """Return the quotient, rounded up."""
    # integers throughout: a float quotient is inexact beyond 2**53
    return -(-number // by)
