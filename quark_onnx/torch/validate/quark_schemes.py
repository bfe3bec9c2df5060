"""Schemes of AMD Quark's layout: support in vLLM, and required tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quark_onnx.torch.runtime.safetensors_header import FLOATS, StoredTensor
from quark_onnx.torch.validate.fields import (
    Conditions,
    is_set,
    is_true,
    is_unset,
    meets,
    one_of,
)
from quark_onnx.torch.validate.layer_checks import (
    SCALAR,
    SCALE,
    Shape,
    Slot,
    Slots,
    ceil_div,
    slot,
)
from quark_onnx.torch.validate.quark_config import Layer, stages

Spec = dict[str, Any]
#: (out, in) of a layer, and requirements for its tensors.
SizeAndSlots = tuple[Shape, Slots]

_INT4 = ("int4", "uint4")
_FP6 = ("fp6_e3m2", "fp6_e2m3")
#: Types of safetensors by the dtypes that take a byte for each value.
_BYTES = {"fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8"}
#: Types of scales of eight bits.
_BYTE_SCALES = ("U8", "F8_E8M0")

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
class QuarkScheme:
    """Weights and activations that a scheme class of vLLM accepts.

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
    QuarkScheme(
        "nvfp4",
        ({**_NVFP4_BLOCKS, **_STATIC}, _E4M3_STATIC),
        ({**_NVFP4_BLOCKS, **_DYNAMIC}, _E4M3_STATIC),
    ),
    # ``_is_fp8_w4a8``: dynamic inputs of any qscheme, or static ones for the whole tensor
    QuarkScheme("int4_fp8", _INT4_FP8, ({**_E4M3, **_DYNAMIC},), experts=True),
    QuarkScheme("int4_fp8", _INT4_FP8, ({**_E4M3, **_PER_TENSOR},), experts=True),
    QuarkScheme(
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
    QuarkScheme(
        "fp8",
        ({**_E4M3, "qscheme": one_of("per_tensor", "per_channel"), **_STATIC},),
        ({**_E4M3, **_DYNAMIC},),
    ),
    QuarkScheme(
        "fp8",
        ({**_E4M3, "qscheme": one_of("per_tensor", "per_channel"), **_STATIC},),
        ({**_E4M3, **_PER_TENSOR},),
    ),
    QuarkScheme(
        "int8",
        ({**_INT8_WEIGHT, **_STATIC},),
        ({"dtype": "int8", **_PER_TENSOR, **_STATIC},),
    ),
    QuarkScheme(
        "int8",
        # with dynamic inputs vLLM does not look at is_dynamic of the weight
        (_INT8_WEIGHT,),
        ({"dtype": "int8", "qscheme": "per_channel", "is_dynamic": is_true},),
    ),
    QuarkScheme(
        "mxfp4_fp8",
        ({"dtype": "fp4", **_MX, **_STATIC},),
        ({**_E4M3_STATIC, "symmetric": is_true},),
        # experts of this kind are a case of ``_microscaling``
        experts=False,
    ),
)


def scheme_in_vllm(
    layer: Layer, pack_method: str, experts: bool = False
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
    """Return whether the number of stages is right, and every stage meets its conditions."""
    # ``map`` would stop at the shorter of the two
    return len(specs) == len(wanted) and all(map(meets, specs, wanted))


def _weight_only_int4(spec: Spec) -> tuple[str, str]:
    """Return the scheme of packed integers, and the reason if unsupported."""
    group, symmetric = spec.get("group_size"), spec.get("symmetric")
    # ``parse_w4a16_int4_weight_config`` of vLLM, quark/utils.py
    if not isinstance(group, int) or group <= 0:
        return "", f"integers of four bits need a positive group_size; it is {group!r}"
    if not isinstance(symmetric, bool):
        return "", f"symmetric is {symmetric!r}, no bool"
    return "w4a16", ""


def _microscaling(weight: Spec, inputs: list[Spec], experts: bool) -> tuple[str, str]:
    """Return the scheme of a microscaling format, and the reason if unsupported.

    The weight has a single stage, and the inputs have one at most.
    """
    dtype = weight.get("dtype")
    # blocks of several rows share a scale; the class for experts takes one row alone
    has_exponents = meets(weight, _MX) or (
        meets(weight, _MX_BLOCKS) and (not experts or weight["block_size"][0] == 1)
    )
    if dtype not in _MX_TYPES or not has_exponents:
        return "", "no scheme has such weights"
    if not inputs:
        return f"mx{dtype}", ""
    kind = inputs[0].get("dtype")
    if inputs[0].get("is_dynamic"):
        if kind in _MX_TYPES:
            return f"mx{dtype}_{kind}", ""
        return "", f"microscaling weights take no inputs of {kind}"
    # ``allow_static_fp8`` of ``_is_w_ocp_mx_a_x`` is set for experts only
    if experts and meets(inputs[0], {**_E4M3_STATIC, "symmetric": is_true}):
        return f"mx{dtype}_fp8", ""
    return "", "microscaling weights take no static inputs"


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
    layer: Layer, weight: StoredTensor, scale: StoredTensor | None
) -> SizeAndSlots | None:
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
    dtype = str(specs[0].get("dtype"))
    if _all_meet(specs, (_E4M3, {"dtype": "int4"})):
        size, slots = _int4_fp8_slots(weight)
    elif dtype in _INT4:
        size, slots = _packed_slots(specs[0], weight, scale)
    elif dtype in ("fp4", *_FP6):
        size, slots = _float_block_slots(specs, weight)
    elif dtype in _BYTES:
        size, slots = _byte_slots(specs[0], weight)
    else:
        return None
    return size, {**slots, **_input_slots(stages(layer.get("input_tensors")))}


def group_of(layer: Layer) -> int:
    """Return the number of input values per scale; 0 without groups."""
    for spec in stages(layer.get("weight")):
        # NVFP4 has its groups in the first stage, int4_fp8 has none
        if spec.get("qscheme") == "per_group":
            return _group_size(spec)
    return 0


def _group_size(spec: Spec) -> int:
    """Return the group_size; 0 if it is no positive integer."""
    size = spec.get("group_size")
    return size if isinstance(size, int) and size > 0 else 0


def _int4_fp8_slots(weight: StoredTensor) -> SizeAndSlots:
    """Return the slots of int4 with a scale per output, and an fp8 scale for all."""
    # the weight is stored as (out, in / 8)
    rows, columns = weight.shape
    return (rows, columns * 8), {
        "weight": slot("I32", (rows, columns)),
        "weight_scale": SCALE,
        # a weight is code * weight_scale_2 * weight_scale
        "weight_scale_2": slot(FLOATS, (rows,)),
        "weight_zero_point_2": slot("I32", (ceil_div(rows, 8),), needed=False),
    }


def _packed_slots(
    spec: Spec, weight: StoredTensor, scale: StoredTensor | None
) -> SizeAndSlots:
    """Return the slots of 4-bit integers, of which an int32 holds eight."""
    rows, columns = weight.shape
    size: Shape = (rows, columns * 8)
    # per tensor
    scales, zeros = SCALAR, SCALAR
    if spec.get("qscheme") == "per_group":
        # the weight is stored as (in, ceil(out / 8)): eight outputs of an input share an int32
        size = (_packed_width(columns, scale), rows)
        groups = max(rows // (_group_size(spec) or rows), 1)
        scales, zeros = ((groups, size[0]),), ((groups, columns),)
    elif spec.get("qscheme") == "per_channel":
        # the weight is stored as (out, in / 8), and eight zero points share an int32
        scales, zeros = ((rows,),), ((ceil_div(rows, 8),),)
    needed = spec.get("symmetric") is False
    return size, {
        "weight": slot("I32", (rows, columns)),
        "weight_scale": slot(FLOATS, *scales),
        # amd-quark writes zero points of symmetric integers as well; vLLM initializes them with 0
        "weight_zero_point": slot("I32", *zeros, needed=needed),
    }


def _packed_width(columns: int, scale: StoredTensor | None) -> int:
    """Return the outputs of a packed weight; only scales tell how many of the last 8 count."""
    if scale is None or len(scale.shape) != 2:
        return columns * 8
    out = scale.shape[1]
    # scales of another width are a finding of their own, and tell nothing about the weight
    return out if ceil_div(out, 8) == columns else columns * 8


def _float_block_slots(specs: list[Spec], weight: StoredTensor) -> SizeAndSlots:
    """Return the slots of fp4 (two values in a byte) or fp6 (four in three)."""
    spec, (out, columns) = specs[0], weight.shape
    # bytes of a row: in * 3 / 4 for fp6, in / 2 for fp4
    into = columns * 2 if spec.get("dtype") == "fp4" else columns * 4 // 3
    # without groups a row has one scale
    blocks = (out, into // (group_of({"weight": specs}) or into))
    in_bytes = (
        # amd-quark names the number format of a scale in either key; e5m3 is AMD's own FP4
        spec.get("scale_format") in ("e8m0", "e5m3", "e4m3")
        or spec.get("scale_type") == "float8_e5m3"
    )
    slots = {
        "weight": slot("U8", (out, columns)),
        "weight_scale": slot(_BYTE_SCALES if in_bytes else FLOATS, blocks),
    }
    # NVFP4: E4M3 scales of the blocks, and a global scale
    if len(specs) == 2:
        slots["weight_scale"] = slot("F8_E4M3", blocks)
        slots["weight_scale_2"] = SCALE
    return (out, into), slots


def _byte_slots(spec: Spec, weight: StoredTensor) -> SizeAndSlots:
    """Return the slots of fp8 and 8-bit integers."""
    dtype, qscheme = str(spec.get("dtype")), spec.get("qscheme")
    out, into = weight.shape
    # amd-quark stores integers in groups and their scales as (in, out), like packed ones
    is_transposed = _is_integer(spec) and qscheme == "per_group"
    if is_transposed:
        out, into = into, out
    shapes = SCALAR
    if qscheme == "per_channel":
        # vLLM's parameter is (out, 1) for integers, and (out,) for fp8
        shapes = ((out,), (out, 1)) if _is_integer(spec) else ((out,),)
    elif qscheme == "per_group":
        groups = into // (_group_size(spec) or into)
        shapes = ((groups, out),) if is_transposed else ((out, groups),)
    elif qscheme == "per_block":
        # (rows, columns) of a block; the last blocks may be incomplete
        high, wide = spec.get("block_size") or (1, 1)
        shapes = ((ceil_div(out, high), ceil_div(into, wide)),)
    has_exponents = (
        spec.get("scale_format") == "e8m0" or spec.get("scale_type") == "float8_e8m0fnu"
    )
    slots = {
        "weight": slot(_BYTES[dtype], weight.shape),
        "weight_scale": slot(_BYTE_SCALES if has_exponents else FLOATS, *shapes),
    }
    if _is_integer(spec):
        slots["weight_zero_point"] = _zero_point(spec, shapes)
    return (out, into), slots


def _is_integer(spec: Spec) -> bool:
    """Return whether values are integers of eight bits."""
    return str(spec.get("dtype")).endswith("int8")


def _zero_point(spec: Spec, shapes: tuple[Shape, ...]) -> Slot:
    """Return the slot of zero points, required for asymmetric integers."""
    # amd-quark writes the type of zero_point_type, int32 by default
    needed = spec.get("symmetric") is False
    return slot(("I8", "U8", "I32"), *shapes, needed=needed)


def _input_slots(specs: list[Spec]) -> Slots:
    """Return the slots of input scales, one for every static stage.

    The names of the second and third stage end with "_2" and "_3".
    """
    slots = {}
    # more than three stages do not exist
    for spec, end in zip(specs, ("", "_2", "_3"), strict=False):
        if spec.get("is_dynamic"):
            continue
        slots[f"input_scale{end}"] = SCALE
        if _is_integer(spec):
            slots[f"input_zero_point{end}"] = _zero_point(spec, SCALAR)
    return slots
