"""Schemes of AMD Quark's layout: support in vLLM, and required tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quark_onnx.torch.validate.fields import (
    Conditions,
    is_set,
    is_true,
    is_unset,
    meets,
    one_of,
)
from quark_onnx.torch.validate.header import FLOATS, Tensor
from quark_onnx.torch.validate.quark_config import Layer, stages
from quark_onnx.torch.validate.slots import (
    SCALAR,
    SCALE,
    Shape,
    Slot,
    Slots,
    ceil_div,
    floats,
)

Spec = dict[str, Any]
#: (out, in) of a layer, and requirements for its tensors.
SizeAndSlots = tuple[Shape, dict[str, Slot]]

_INT4 = ("int4", "uint4")
_FP6 = ("fp6_e3m2", "fp6_e2m3")
#: Types of safetensors by the dtypes that take a byte for each value.
_BYTES = {"fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8"}

#: vLLM tests ``not weight_quant.get("is_dynamic")``, so that a missing key means static.
_STATIC = {"is_dynamic": is_unset}
_DYNAMIC = {"is_dynamic": is_set}
_PER_TENSOR = {"qscheme": "per_tensor"}
_E4M3 = {"dtype": "fp8_e4m3"}
#: Also the second stage of NVFP4: the global scale of the E4M3 scales of the blocks.
_E4M3_STATIC = {**_E4M3, **_PER_TENSOR, **_STATIC}
_INT8_WEIGHT = {
    "dtype": "int8",
    "qscheme": one_of("per_tensor", "per_channel"),
    "symmetric": is_true,
}
_NVFP4_BLOCKS = {"dtype": "fp4", "qscheme": "per_group", "group_size": 16}
#: A global scale in fp8, and integers of four bits with a scale for each output.
_INT4_FP8 = (
    _E4M3_STATIC,
    {
        "dtype": "int4",
        "qscheme": "per_channel",
        "symmetric": is_true,
        "ch_axis": 0,
        **_STATIC,
    },
)
#: OCP MX: 32 values share an exponent of 8 bits.
_MX = {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
#: MXFP8 as blocks of two dimensions, of which each row has 32 values.
_MX_BLOCKS = {
    **_E4M3,
    "qscheme": "per_block",
    "block_size": lambda block: len(block or ()) == 2 and block[1] == 32,
    "scale_type": "float8_e8m0fnu",
    "symmetric": is_true,
    **_STATIC,
}
#: Element types of OCP MX that vLLM has kernels or emulation for (ocp_mx_utils.py).
_MX_TYPES = ("fp4", *_FP6, "fp8_e4m3")


@dataclass(frozen=True)
class Scheme:
    """Scheme of vLLM: what its class takes.

    Attributes:
        name: name in verdicts.
        weight: conditions on each stage of the weight's specification.
        inputs: conditions on each stage of the specification of the inputs.
        experts: whether it is for experts of a mixture, or not; None for both.
    """

    name: str
    weight: Sequence[Conditions]
    inputs: Sequence[Conditions]
    experts: bool | None = None

    def takes(self, weight: list[Spec], inputs: list[Spec], experts: bool) -> bool:
        """Return whether the scheme is for a layer."""
        # classes for experts are other classes than those for Linear layers
        if self.experts not in (None, experts):
            return False
        return _all_meet(weight, self.weight) and _all_meet(inputs, self.inputs)


#: Schemes with fixed inputs: ``_is_fp8_w8a8``, ``_is_static_tensor_w8a8`` and their like in
#: vllm/model_executor/layers/quantization/quark/quark.py of vLLM 0.33. Weights alone and other
#: microscaling formats follow in ``scheme_in_vllm``, as their names depend on the types.
SCHEMES = (
    Scheme(
        "nvfp4",
        ({**_NVFP4_BLOCKS, **_STATIC}, _E4M3_STATIC),
        ({**_NVFP4_BLOCKS, **_DYNAMIC}, _E4M3_STATIC),
    ),
    # ``_is_fp8_w4a8``: dynamic inputs of any qscheme, or static ones for the whole tensor
    Scheme("int4_fp8", _INT4_FP8, ({**_E4M3, **_DYNAMIC},), experts=True),
    Scheme("int4_fp8", _INT4_FP8, ({**_E4M3, **_PER_TENSOR},), experts=True),
    Scheme(
        "fp8",
        (
            {
                **_E4M3,
                "qscheme": "per_block",
                # DeepSeek's blocks; vLLM takes no others
                "block_size": lambda block: list(block or ()) == [128, 128],
                "symmetric": is_true,
                **_STATIC,
            },
        ),
        (
            {
                **_E4M3,
                "qscheme": "per_group",
                # groups of inputs are as wide as the blocks of the weight
                "group_size": 128,
                "symmetric": is_true,
                **_DYNAMIC,
            },
        ),
    ),
    Scheme(
        "fp8",
        ({**_E4M3, "qscheme": one_of("per_tensor", "per_channel"), **_STATIC},),
        ({**_E4M3, **_DYNAMIC},),
    ),
    Scheme(
        "fp8",
        ({**_E4M3, "qscheme": one_of("per_tensor", "per_channel"), **_STATIC},),
        ({**_E4M3, **_PER_TENSOR},),
    ),
    Scheme(
        "int8",
        ({**_INT8_WEIGHT, **_STATIC},),
        ({"dtype": "int8", **_PER_TENSOR, **_STATIC},),
    ),
    Scheme(
        "int8",
        # with dynamic inputs vLLM does not look at is_dynamic of the weight
        (_INT8_WEIGHT,),
        ({"dtype": "int8", "qscheme": "per_channel", "is_dynamic": is_true},),
    ),
    Scheme(
        "mxfp4_fp8",
        ({"dtype": "fp4", **_MX, **_STATIC},),
        ({**_E4M3_STATIC, "symmetric": is_true},),
        # experts of this kind are a case of ``_microscaling``
        experts=False,
    ),
)


def scheme_in_vllm(
    layer: Layer,
    pack_method: str,
    experts: bool = False,
) -> tuple[str, str]:
    """Return vLLM 0.33's scheme for a layer, and the reason if unsupported.

    Args:
        layer: configuration of the layer.
        pack_method: order of packed 4-bit integers.
        experts: whether the layer is an expert of a mixture; experts have their own classes.

    Returns:
        A pair ("fp8", "") or ("", reason).
    """
    weight = stages(layer.get("weight"))
    inputs = stages(layer.get("input_tensors"))
    # rows that overlap have the same name, so that their order does not matter
    for scheme in SCHEMES:
        if scheme.takes(weight, inputs, experts):
            return scheme.name, ""
    # vLLM raises for several stages before it looks at the other schemes
    if max(len(weight), len(inputs)) > 1:
        return "", (
            "of two stages is nvfp4 alone: fp4 in groups of 16 and fp8_e4m3, inputs"
            " dynamic in the first stage"
        )
    if not weight:
        return "", "the weight has no specification"
    if meets(weight[0], {"qscheme": "per_block", "block_size": is_unset}):
        return "", "per_block needs a block_size"
    # int4 with inputs has no scheme: microscaling, the last one, takes no integers
    packed = pack_method in ("order", "reorder") and not inputs
    if packed and weight[0].get("dtype") in _INT4:
        return _weight_only_int4(weight[0])
    return _microscaling(weight[0], inputs, experts)


def _all_meet(specs: list[Spec], wanted: Sequence[Conditions]) -> bool:
    """Return whether the number of stages is right, and every stage meets its conditions.

    Args:
        specs: the stages of a tensor.
        wanted: the conditions of each stage, in the same order.
    """
    # ``map`` would stop at the shorter of the two
    if len(specs) != len(wanted):
        return False
    return all(map(meets, specs, wanted))


def _weight_only_int4(spec: Spec) -> tuple[str, str]:
    """Return the scheme of packed integers, and the reason if unsupported.

    Args:
        spec: the single stage of the weight, of a 4-bit integer type.

    Returns:
        A pair ("w4a16", "") or ("", reason).
    """
    group, symmetric = spec.get("group_size"), spec.get("symmetric")
    # ``parse_w4a16_int4_weight_config`` of vLLM, quark/utils.py
    if not isinstance(group, int) or group <= 0:
        return "", f"integers of four bits need a positive group_size; it is {group!r}"
    if not isinstance(symmetric, bool):
        return "", f"symmetric is {symmetric!r}, no bool"
    return "w4a16", ""


def _microscaling(
    weight: Spec,
    inputs: list[Spec],
    experts: bool,
) -> tuple[str, str]:
    """Return the scheme of a microscaling format, and the reason if unsupported.

    Args:
        weight: the single stage of the weight.
        inputs: the stages of the inputs, at most one; empty for weights alone.
        experts: whether the layer is an expert of a mixture.

    Returns:
        A pair such as ("mxfp4_fp8", "") or ("", reason).
    """
    dtype = weight.get("dtype")
    if dtype not in _MX_TYPES or not _has_exponents(weight, experts):
        return "", "no scheme has such weights"
    if not inputs:
        return f"mx{dtype}", ""
    # more stages than one have been refused above
    kind = inputs[0].get("dtype")
    if inputs[0].get("is_dynamic"):
        if kind in _MX_TYPES:
            return f"mx{dtype}_{kind}", ""
        return "", f"microscaling weights take no inputs of {kind}"
    # ``allow_static_fp8`` of ``_is_w_ocp_mx_a_x`` is set for experts only
    if experts and meets(inputs[0], {**_E4M3_STATIC, "symmetric": is_true}):
        return f"mx{dtype}_fp8", ""
    return "", "microscaling weights take no static inputs"


def _has_exponents(weight: Spec, experts: bool) -> bool:
    """Return whether each 32 values share an exponent; experts have it in one row alone."""
    if meets(weight, _MX):
        return True
    # blocks of several rows share a scale; the class for experts takes one row alone
    return meets(weight, _MX_BLOCKS) and (not experts or weight["block_size"][0] == 1)


def describe(layer: Layer) -> str:
    """Return a layer's number formats in a few words.

    >>> describe({"weight": {"dtype": "int4", "qscheme": "per_channel"}, "input_tensors": None})
    'weight int4 per_channel'
    """
    parts = []
    for what, key in (("weight", "weight"), ("input", "input_tensors")):
        # "fp8_e4m3 per_tensor of int4 per_channel" names two stages
        words = " of ".join(map(_words, stages(layer.get(key))))
        if words:
            parts.append(f"{what} {words}")
    return ", ".join(parts) or "nothing"


def _words(spec: Spec) -> str:
    """Return the number format of a stage, such as "int4 per_group 128"."""
    text = f"{spec.get('dtype')} {spec.get('qscheme')}"
    if spec.get("group_size"):
        text += f" {spec['group_size']}"
    if spec.get("is_dynamic"):
        text += " dynamic"
    return text


def slots_of(
    layer: Layer,
    weight: Tensor,
    scale: Tensor | None,
) -> tuple[Shape, Slots] | None:
    """Return a layer's (out, in) by its weight's shape, and required tensors.

    None for a number format without a layout.

    Args:
        layer: configuration of the layer.
        weight: the stored weight.
        scale: the stored scales, which determine the width of a packed weight.
    """
    specs = stages(layer.get("weight"))
    if not specs:
        return None
    # the first stage decides how values are stored, except for int4_fp8
    make_slots = _SLOTS_BY_DTYPE.get(str(specs[0].get("dtype")))
    if _all_meet(specs, (_E4M3, {"dtype": "int4"})):
        make_slots = _int4_fp8_slots
    if make_slots is None:
        return None
    size, slots = make_slots(specs, weight, scale)
    return size, {**slots, **_input_slots(stages(layer.get("input_tensors")))}


def group_of(layer: Layer) -> int:
    """Return the number of input values per scale; 0 without groups."""
    for spec in stages(layer.get("weight")):
        # NVFP4 has its groups in the first stage, int4_fp8 has none
        if spec.get("qscheme") == "per_group":
            # a second stage scales the scales of the first
            return _group_size(spec)
    return 0


def _group_size(spec: Spec) -> int:
    """Return the group_size; 0 if it is no positive integer."""
    size = spec.get("group_size")
    return size if isinstance(size, int) and size > 0 else 0


def _int4_fp8_slots(
    specs: list[Spec],
    weight: Tensor,
    scale: Tensor | None,
) -> SizeAndSlots:
    """Return the size and slots of int4 with a scale per output, and an fp8 scale for all.

    Args:
        specs: the two stages of the weight: fp8, then int4.
        weight: the packed weight, of shape (out, in / 8).
        scale: not read.
    """
    rows, columns = weight.shape
    return (rows, columns * 8), {
        "weight": Slot(("I32",), ((rows, columns),)),
        "weight_scale": SCALE,
        # a weight is code * weight_scale_2 * weight_scale
        "weight_scale_2": floats((rows,)),
        "weight_zero_point_2": Slot(("I32",), ((ceil_div(rows, 8),),), needed=False),
    }


def _float_blocks(
    specs: list[Spec],
    weight: Tensor,
    scale: Tensor | None,
) -> SizeAndSlots:
    """Return the size and slots of fp4 (two values in a byte) or fp6 (four in three).

    Args:
        specs: the stages of the weight, of which the first has the number format.
        weight: the packed weight, of shape (out, bytes of a row).
        scale: not read.
    """
    out, columns = weight.shape
    # bytes of a row: in * 3 / 4 for fp6, in / 2 for fp4
    into = columns * 4 // 3
    if specs[0].get("dtype") == "fp4":
        into = columns * 2
    return (out, into), {
        "weight": Slot(("U8",), ((out, columns),)),
        **_block_scales(specs, out, into),
    }


def _bytes(
    specs: list[Spec],
    weight: Tensor,
    scale: Tensor | None,
) -> SizeAndSlots:
    """Return the size and slots of fp8 and 8-bit integers.

    Args:
        specs: the stages of the weight, of which the first has the number format.
        weight: the stored weight: (in, out) for integers in groups, else (out, in).
        scale: not read.
    """
    spec = specs[0]
    dtype = str(spec.get("dtype"))
    out, into = weight.shape
    # amd-quark stores integers in groups as (in, out), like packed ones
    transposed = dtype in ("int8", "uint8") and spec.get("qscheme") == "per_group"
    if transposed:
        out, into = into, out
    return (out, into), {
        "weight": Slot((_BYTES[dtype],), (weight.shape,)),
        **_scales(spec, out, into, transposed),
    }


def _packed_integers(
    specs: list[Spec],
    weight: Tensor,
    scale: Tensor | None,
) -> SizeAndSlots:
    """Return the size and slots of 4-bit integers, of which an int32 holds eight.

    Args:
        specs: the stages of the weight, of which the first has the number format.
        weight: the packed weight: (in, ceil(out / 8)) for groups, else (out, in / 8).
        scale: the stored scales, which give the number of outputs of a weight in groups; None if
            the file lacks them.
    """
    spec = specs[0]
    rows, columns = weight.shape
    size: Shape = (rows, columns * 8)
    # per tensor
    scales, zeros = SCALE, SCALAR
    if spec.get("qscheme") == "per_group":
        # the weight is stored as (in, ceil(out / 8)): eight outputs of an input share an int32
        size = (_packed_width(columns, scale), rows)
        groups = max(rows // (_group_size(spec) or rows), 1)
        scales, zeros = floats((groups, size[0])), ((groups, columns),)
    elif spec.get("qscheme") == "per_channel":
        # the weight is stored as (out, in / 8), and eight zero points share an int32
        scales, zeros = floats((rows,)), ((ceil_div(rows, 8),),)
    return size, {
        "weight": Slot(("I32",), ((rows, columns),)),
        "weight_scale": scales,
        # amd-quark writes zero points of symmetric integers as well; vLLM initializes them with 0
        "weight_zero_point": Slot(("I32",), zeros, spec.get("symmetric") is False),
    }


_SLOTS_BY_DTYPE: dict[
    str,
    Callable[[list[Spec], Tensor, Tensor | None], SizeAndSlots],
] = {
    **dict.fromkeys(_INT4, _packed_integers),
    **dict.fromkeys(("fp4", *_FP6), _float_blocks),
    **dict.fromkeys(_BYTES, _bytes),
}


def _packed_width(columns: int, scale: Tensor | None) -> int:
    """Return the outputs of a packed weight; only scales tell how many of the last 8 count.

    Args:
        columns: number of int32 values for each input, ceil(out / 8).
        scale: the stored scales, of shape (groups, out); None if the file lacks them.

    Returns:
        The number of outputs; a multiple of 8 if the scales do not fit the weight.
    """
    if scale is None or len(scale.shape) != 2:
        return columns * 8
    out = scale.shape[1]
    # scales of another width are a finding of their own, and tell nothing about the weight
    return out if ceil_div(out, 8) == columns else columns * 8


def _block_scales(specs: list[Spec], out: int, into: int) -> dict[str, Slot]:
    """Return the slots of the scales of fp4 or fp6 in groups.

    Args:
        specs: the stages of the weight; two for NVFP4.
        out: number of outputs.
        into: number of inputs.
    """
    # without groups a row has one scale
    group = group_of({"weight": specs}) or into
    blocks = (out, into // group)
    # NVFP4: E4M3 scales of the blocks, and a global scale
    if len(specs) == 2:
        return {"weight_scale": Slot(("F8_E4M3",), (blocks,)), "weight_scale_2": SCALE}
    spec = specs[0]
    in_bytes = (
        # amd-quark names the number format of a scale in either key; e5m3 is AMD's own FP4
        spec.get("scale_format") in ("e8m0", "e5m3", "e4m3")
        or spec.get("scale_type") == "float8_e5m3"
    )
    return {"weight_scale": Slot(_scale_types(in_bytes), (blocks,))}


def _scale_types(in_bytes: bool) -> tuple[str, ...]:
    """Return the types of scales of eight bits, or of float scales."""
    if in_bytes:
        return ("U8", "F8_E8M0")
    return FLOATS


def _scales(spec: Spec, out: int, into: int, transposed: bool) -> dict[str, Slot]:
    """Return the slots of the scales and zero points of a weight in bytes.

    Args:
        spec: specification of the weight.
        out: number of outputs.
        into: number of inputs.
        transposed: whether the weight is stored as (in, out).

    Returns:
        Slots by tensor name; zero points only for integers.
    """
    shapes = _scale_shapes(spec, out, into, transposed)
    has_exponents = (
        spec.get("scale_format") == "e8m0" or spec.get("scale_type") == "float8_e8m0fnu"
    )
    slots = {"weight_scale": Slot(_scale_types(has_exponents), shapes)}
    if _is_integer(spec):
        slots["weight_zero_point"] = _zero_point(spec, shapes)
    return slots


def _is_integer(spec: Spec) -> bool:
    """Return whether values are integers of eight bits."""
    return str(spec.get("dtype")).endswith("int8")


def _scale_shapes(
    spec: Spec,
    out: int,
    into: int,
    transposed: bool,
) -> tuple[Shape, ...]:
    """Return the accepted shapes of the scales of an 8-bit weight.

    Args:
        spec: specification of the weight.
        out: number of outputs.
        into: number of inputs.
        transposed: whether the weight is stored as (in, out).
    """
    shapes_of = _SCALE_SHAPES.get(str(spec.get("qscheme")))
    if shapes_of is None:
        return SCALAR
    return shapes_of(spec, out, into, transposed)


def _channel_shapes(
    spec: Spec,
    out: int,
    into: int,
    transposed: bool,
) -> tuple[Shape, ...]:
    """Return the shapes of scales by output."""
    # vLLM's parameter is (out, 1) for integers, and (out,) for fp8
    if _is_integer(spec):
        return ((out,), (out, 1))
    return ((out,),)


def _group_shapes(
    spec: Spec,
    out: int,
    into: int,
    transposed: bool,
) -> tuple[Shape, ...]:
    """Return the shape of scales by output and group of inputs."""
    groups = into // (_group_size(spec) or into)
    # scales lie like the weight
    if transposed:
        return ((groups, out),)
    return ((out, groups),)


def _block_shapes(
    spec: Spec,
    out: int,
    into: int,
    transposed: bool,
) -> tuple[Shape, ...]:
    """Return the shape of scales by block of outputs and inputs."""
    # (rows, columns) of a block; the last blocks may be incomplete
    high, wide = spec.get("block_size") or (1, 1)
    return ((ceil_div(out, high), ceil_div(into, wide)),)


#: Shapes of scales by qscheme; other qschemes have a single scale.
_SCALE_SHAPES = {
    "per_channel": _channel_shapes,
    "per_group": _group_shapes,
    "per_block": _block_shapes,
}


def _zero_point(spec: Spec, shapes: tuple[Shape, ...]) -> Slot:
    """Return the slot of zero points, required for asymmetric integers.

    Args:
        spec: specification of the tensor.
        shapes: the accepted shapes, those of the scales.
    """
    # amd-quark writes the type of zero_point_type, int32 by default
    return Slot(("I8", "U8", "I32"), shapes, spec.get("symmetric") is False)


def _input_slots(specs: list[Spec]) -> dict[str, Slot]:
    """Return the slots of input scales, one for every static stage.

    Args:
        specs: the stages of the inputs; empty for weights alone.

    Returns:
        Slots of scales, and of zero points for integers, by tensor name; the names of the second
        and third stage end with "_2" and "_3".
    """
    slots = {}
    # names of scales by the number of the stage; more than three stages do not exist
    for spec, end in zip(specs, ("", "_2", "_3"), strict=False):
        if spec.get("is_dynamic"):
            continue
        slots[f"input_scale{end}"] = SCALE
        if _is_integer(spec):
            slots[f"input_zero_point{end}"] = _zero_point(spec, SCALAR)
    return slots
