"""Schemes of AMD Quark's layout: support in vLLM, and required tensors."""

from __future__ import annotations

from typing import Any

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

_INT4 = ("int4", "uint4")
_FP6 = ("fp6_e3m2", "fp6_e2m3")
_BYTES = {"fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8"}


def scheme_in_vllm(  # noqa: C901, PLR0911
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
    weight, inputs = layer.get("weight"), layer.get("input_tensors")
    if any(isinstance(spec, list) and len(spec) > 1 for spec in (weight, inputs)):
        if _is_nvfp4(weight, inputs):
            return "nvfp4", ""
        if experts and _is_int4_fp8(weight, inputs):
            return "int4_fp8", ""
        return (
            "",
            (
                "of two stages is nvfp4 alone: fp4 in groups of 16 and fp8_e4m3, inputs"
                " dynamic in the first stage"
            ),
        )
    first, second = _single(weight), _single(inputs)
    if first is None:
        return "", "the weight has no specification"
    if first.get("qscheme") == "per_block" and not first.get("block_size"):
        return "", "per_block needs a block_size"
    if second is not None and _is_fp8(first, second):
        return "fp8", ""
    if second is not None and _is_int8(first, second):
        return "int8", ""
    if (
        second is None
        and first.get("dtype") in _INT4
        and pack_method in ("order", "reorder")
    ):
        group, symmetric = first.get("group_size"), first.get("symmetric")
        if not isinstance(group, int) or group <= 0:
            return (
                "",
                f"integers of four bits need a positive group_size; it is {group!r}",
            )
        if not isinstance(symmetric, bool):
            return "", f"symmetric is {symmetric!r}, no bool"
        return "w4a16", ""
    if second is not None and not experts and _is_mxfp4_fp8(first, second):
        return "mxfp4_fp8", ""
    return _microscaling(first, second, experts)


def describe(layer: Layer) -> str:
    """Return a layer's number formats in a few words.

    >>> describe({"weight": {"dtype": "int4", "qscheme": "per_channel"}, "input_tensors": None})
    'weight int4 per_channel'
    """
    parts = []
    for what, key in (("weight", "weight"), ("input", "input_tensors")):
        words = [_words(spec) for spec in stages(layer.get(key))]
        if words:
            parts.append(f"{what} {' of '.join(words)}")
    return ", ".join(parts) or "nothing"


def _words(spec: Spec) -> str:
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
    specs, (rows, columns) = stages(layer.get("weight")), weight.shape
    if not specs:
        return None
    spec, dtype = specs[0], str(specs[0].get("dtype"))
    inputs = _input_slots(stages(layer.get("input_tensors")))
    if [stage.get("dtype") for stage in specs] == ["fp8_e4m3", "int4"]:
        out, into = rows, columns * 8
        own = {
            "weight": Slot(("I32",), ((out, columns),)),
            "weight_scale": SCALE,
            "weight_scale_2": floats((out,)),
            "weight_zero_point_2": Slot(("I32",), ((ceil_div(out, 8),),), needed=False),
        }
    elif dtype in _INT4:
        (out, into), own = _packed_integers(spec, weight, scale)
    elif dtype == "fp4" or dtype in _FP6:
        out, into = rows, columns * 2 if dtype == "fp4" else columns * 4 // 3
        own = {
            "weight": Slot(("U8",), ((rows, columns),)),
            **_block_scales(specs, out, into),
        }
    elif dtype in _BYTES:
        transposed = dtype in ("int8", "uint8") and spec.get("qscheme") == "per_group"
        out, into = (columns, rows) if transposed else (rows, columns)
        own = {
            "weight": Slot((_BYTES[dtype],), ((rows, columns),)),
            **_scales(spec, out, into, transposed),
        }
    else:
        return None
    return (out, into), {**own, **inputs}


def group_of(layer: Layer) -> int:
    """Return the number of input values per scale; 0 without groups."""
    found = [
        spec.get("group_size")
        for spec in stages(layer.get("weight"))
        if spec.get("qscheme") == "per_group"
    ]
    if found and isinstance(found[0], int) and found[0] > 0:
        return found[0]
    return 0


def _packed_integers(
    spec: Spec,
    weight: Tensor,
    scale: Tensor | None,
) -> tuple[Shape, dict[str, Slot]]:
    rows, columns = weight.shape
    stored = {"weight": Slot(("I32",), ((rows, columns),))}
    needed = spec.get("symmetric") is False
    if spec.get("qscheme") != "per_group":
        channels = spec.get("qscheme") == "per_channel"
        zeros = ((ceil_div(rows, 8),),) if channels else SCALAR
        scales = floats((rows,)) if channels else SCALE
        return (rows, columns * 8), {
            **stored,
            "weight_scale": scales,
            "weight_zero_point": Slot(("I32",), zeros, needed),
        }
    out = columns * 8
    if (
        scale is not None
        and len(scale.shape) == 2
        and ceil_div(scale.shape[1], 8) == columns
    ):
        out = scale.shape[1]
    groups = max(rows // (group_of({"weight": spec}) or rows), 1)
    zeros = ((groups, columns),)
    return (out, rows), {
        **stored,
        "weight_scale": floats((groups, out)),
        "weight_zero_point": Slot(("I32",), zeros, needed),
    }


def _block_scales(specs: list[Spec], out: int, into: int) -> dict[str, Slot]:
    group = group_of({"weight": specs}) or into
    blocks = (out, into // group)
    if len(specs) == 2:
        return {"weight_scale": Slot(("F8_E4M3",), (blocks,)), "weight_scale_2": SCALE}
    exponents = (
        specs[0].get("scale_format") in ("e8m0", "e5m3", "e4m3")
        or specs[0].get("scale_type") == "float8_e5m3"
    )
    return {"weight_scale": Slot(_scale_types(exponents), (blocks,))}


def _scale_types(exponents: bool) -> tuple[str, ...]:
    if exponents:
        return ("U8", "F8_E8M0")
    return FLOATS


def _scales(spec: Spec, out: int, into: int, transposed: bool) -> dict[str, Slot]:
    qscheme, integer = spec.get("qscheme"), str(spec.get("dtype")).endswith("int8")
    if qscheme == "per_channel":
        shapes: tuple[Shape, ...] = ((out,), (out, 1))[: 2 if integer else 1]
    elif qscheme == "per_group":
        groups = into // (group_of({"weight": spec}) or into)
        shapes = ((groups, out) if transposed else (out, groups),)
    elif qscheme == "per_block":
        high, wide = spec.get("block_size") or (1, 1)
        shapes = ((ceil_div(out, high), ceil_div(into, wide)),)
    else:
        shapes = SCALAR
    exponents = (
        spec.get("scale_format") == "e8m0" or spec.get("scale_type") == "float8_e8m0fnu"
    )
    slots = {"weight_scale": Slot(_scale_types(exponents), shapes)}
    if integer:
        slots["weight_zero_point"] = Slot(
            ("I8", "U8", "I32"),
            shapes,
            spec.get("symmetric") is False,
        )
    return slots


def _input_slots(specs: list[Spec]) -> dict[str, Slot]:
    slots = {}
    for place, spec in enumerate(specs):
        if not spec.get("is_dynamic"):
            end = f"_{place + 1}" if place else ""
            slots[f"input_scale{end}"] = SCALE
            if str(spec.get("dtype")).endswith("int8"):
                zero = Slot(("I8", "U8", "I32"), SCALAR, spec.get("symmetric") is False)
                slots[f"input_zero_point{end}"] = zero
    return slots


def _single(spec: Any) -> Spec | None:
    if isinstance(spec, list):
        return spec[0] if len(spec) == 1 else None
    return spec if isinstance(spec, dict) else None


def _is_fp8(weight: Spec, inputs: Spec) -> bool:
    if (
        weight.get("dtype") != "fp8_e4m3"
        or inputs.get("dtype") != "fp8_e4m3"
        or weight.get("is_dynamic")
    ):
        return False
    if weight.get("qscheme") == "per_block":
        return bool(
            list(weight.get("block_size") or []) == [128, 128]
            and weight.get("symmetric") is True
            and inputs.get("is_dynamic")
            and inputs.get("qscheme") == "per_group"
            and inputs.get("group_size") == 128
            and inputs.get("symmetric") is True,
        )
    if weight.get("qscheme") not in ("per_tensor", "per_channel"):
        return False
    return bool(inputs.get("is_dynamic")) or inputs.get("qscheme") == "per_tensor"


def _is_int8(weight: Spec, inputs: Spec) -> bool:
    static = inputs.get("qscheme") == "per_tensor" and not inputs.get("is_dynamic")
    tokens = inputs.get("qscheme") == "per_channel" and inputs.get("is_dynamic") is True
    return bool(
        weight.get("dtype") == "int8"
        and inputs.get("dtype") == "int8"
        and weight.get("qscheme") in ("per_tensor", "per_channel")
        and weight.get("symmetric") is True
        and ((static and not weight.get("is_dynamic")) or tokens),
    )


def _is_mxfp4_fp8(weight: Spec, inputs: Spec) -> bool:
    return bool(
        weight.get("dtype") == "fp4"
        and _exponents(weight)
        and not weight.get("is_dynamic")
        and inputs.get("dtype") == "fp8_e4m3"
        and inputs.get("qscheme") == "per_tensor"
        and not inputs.get("is_dynamic")
        and inputs.get("symmetric") is True,
    )


def _is_nvfp4(weight: Any, inputs: Any) -> bool:
    pairs = [
        spec for spec in (weight, inputs) if isinstance(spec, list) and len(spec) == 2
    ]
    if len(pairs) < 2:
        return False
    blocks = all(
        spec[0].get("dtype") == "fp4"
        and spec[0].get("qscheme") == "per_group"
        and spec[0].get("group_size") == 16
        for spec in pairs
    )
    totals = all(
        spec[1].get("dtype") == "fp8_e4m3"
        and spec[1].get("qscheme") == "per_tensor"
        and not spec[1].get("is_dynamic")
        for spec in pairs
    )
    return bool(
        blocks
        and totals
        and not weight[0].get("is_dynamic")
        and inputs[0].get("is_dynamic"),
    )


def _is_int4_fp8(weight: Any, inputs: Any) -> bool:
    second = _single(inputs)
    if (
        not isinstance(weight, list)
        or len(weight) != 2
        or second is None
        or second.get("dtype") != "fp8_e4m3"
    ):
        return False
    coarse, fine = weight
    return bool(
        (coarse.get("dtype"), coarse.get("qscheme")) == ("fp8_e4m3", "per_tensor")
        and (fine.get("dtype"), fine.get("qscheme")) == ("int4", "per_channel")
        and fine.get("symmetric") is True
        and fine.get("ch_axis") == 0
        and not coarse.get("is_dynamic")
        and not fine.get("is_dynamic")
        and (second.get("is_dynamic") or second.get("qscheme") == "per_tensor"),
    )


def _exponents(weight: Spec) -> bool:
    return bool(
        weight.get("qscheme") == "per_group"
        and weight.get("group_size") == 32
        and weight.get("scale_format") == "e8m0",
    )


def _microscaling(weight: Spec, inputs: Spec | None, experts: bool) -> tuple[str, str]:
    dtype, high = weight.get("dtype"), weight.get("block_size") or []
    blocks = (
        dtype == "fp8_e4m3"
        and weight.get("qscheme") == "per_block"
        and len(high) == 2
        and high[1] == 32
        and weight.get("scale_type") == "float8_e8m0fnu"
        and weight.get("symmetric") is True
        and not weight.get("is_dynamic")
        and (not experts or high[0] == 1)
    )
    if dtype not in ("fp4", *_FP6, "fp8_e4m3") or not (_exponents(weight) or blocks):
        return "", "no scheme has such weights"
    if inputs is None:
        return f"mx{dtype}", ""
    kind = inputs.get("dtype")
    if not inputs.get("is_dynamic"):
        static = (
            kind == "fp8_e4m3"
            and inputs.get("qscheme") == "per_tensor"
            and inputs.get("symmetric") is True
        )
        if not (experts and static):
            return "", "microscaling weights take no static inputs"
        return f"mx{dtype}_fp8", ""
    if kind not in ("fp8_e4m3", "fp4", *_FP6):
        return "", f"microscaling weights take no inputs of {kind}"
    return f"mx{dtype}_{kind}", ""
