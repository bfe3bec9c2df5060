"""Schemes: the number formats of a layer's tensors, by AMD Quark's names."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec

_FP8 = TensorSpec("fp8e4m3")
# Per channel of an activation means per token.
_FP8_TOKENS = _FP8.with_(per_channel=True, dynamic=True)
_INT8 = TensorSpec("int8")
_INT4, _UINT4 = TensorSpec("int4"), TensorSpec("uint4", symmetric=False)
_MXFP4, _MXFP6_E2M3, _MXFP6_E3M2 = (
    TensorSpec("mxfp4e2m1"),
    TensorSpec("mxfp6e2m3"),
    TensorSpec("mxfp6e3m2"),
)
_NVFP4 = TensorSpec("nvfp4")
#: Values per group of the schemes in groups.
GROUP_SIZES = (32, 64, 128)


def _same(spec: TensorSpec) -> LayerSpec:
    """Return the specification of a layer whose input has the format of the weight."""
    return LayerSpec(spec, spec)


def _in_groups(dtype: str, weight: TensorSpec) -> dict[str, LayerSpec]:
    """Return the weight-only schemes of a number format in groups, by name."""
    return {
        f"{dtype}_wo_{size}": LayerSpec(weight.with_(block_size=size))
        for size in GROUP_SIZES
    }


#: By the names of AMD Quark 0.13; "wo" stands for weight-only.
SCHEMES: dict[str, LayerSpec] = {
    "fp8": _same(_FP8),
    "ptpc_fp8": LayerSpec(_FP8.with_(per_channel=True), _FP8_TOKENS),
    "int8": _same(_INT8),
    **_in_groups("int4", _INT4),
    "int4_wo_per_channel": LayerSpec(_INT4.with_(per_channel=True)),
    **_in_groups("uint4", _UINT4),
    "uint4_wo_per_channel": LayerSpec(_UINT4.with_(per_channel=True)),
    "int4_wa_64": LayerSpec(
        _INT4.with_(block_size=64),
        _INT4.with_(block_size=64, dynamic=True),
    ),
    "mxfp4": _same(_MXFP4),
    "mxfp4_weight_only": LayerSpec(_MXFP4),
    "mxfp6_e2m3": _same(_MXFP6_E2M3),
    "mxfp6_e3m2": _same(_MXFP6_E3M2),
    "mxfp4_mxfp6_e2m3": LayerSpec(_MXFP4, _MXFP6_E2M3),
    "mxfp4_fp8": LayerSpec(_MXFP4, _FP8),
    "mxfp8": _same(TensorSpec("mxfp8e4m3")),
    "nvfp4": _same(_NVFP4),
    "amdfp4": _same(TensorSpec("amdfp4")),
    "amdfp4_g32": _same(TensorSpec("amdfp4g32")),
    # AMD Quark stores both factors of the scales in float32.
    "int4_fp8": LayerSpec(
        TensorSpec("int4fp8", per_channel=True, scale="float32"),
        _FP8.with_(dynamic=True, scale="float32"),
    ),
    "mx6": _same(TensorSpec("mx6")),
    "mx9": _same(TensorSpec("mx9")),
    "bfp16": _same(TensorSpec("bfp16")),
    "uint4_int8": LayerSpec(
        _UINT4.with_(per_channel=True),
        _INT8.with_(per_channel=True, dynamic=True),
    ),
    "int8_per_channel": LayerSpec(
        _INT8.with_(per_channel=True),
        _INT8.with_(per_channel=True, dynamic=True),
    ),
    **_in_groups("int3", TensorSpec("int3")),
    **_in_groups("uint2", TensorSpec("uint2", symmetric=False)),
    **_in_groups("uint3", TensorSpec("uint3", symmetric=False)),
    "bf16": LayerSpec(TensorSpec("bfloat16")),
    "fp16": LayerSpec(TensorSpec("float16")),
}

#: The names of earlier generations; "{group}" is filled in.
_EARLIER = {
    "w_fp8_a_fp8": "fp8",
    "w_int8_a_int8_per_tensor_sym": "int8",
    "w_int8_a_int8_per_tensor_sym_dynamic": "int8",
    "w_int4_per_group_sym": "int4_wo_{group}",
    "w_int4_per_channel_sym": "int4_wo_per_channel",
    "w_uint4_per_group_asym": "uint4_wo_{group}",
    "w_uint4_per_channel_asym": "uint4_wo_per_channel",
    "w_mxfp4_a_mxfp4": "mxfp4",
    "w_mxfp4": "mxfp4_weight_only",
    "w_mxfp4_a_fp8": "mxfp4_fp8",
    "w_mxfp4_a_mxfp6_e2m3": "mxfp4_mxfp6_e2m3",
    "w_mxfp6_e2m3_a_mxfp6_e2m3": "mxfp6_e2m3",
    "w_mxfp6_e3m2_a_mxfp6_e3m2": "mxfp6_e3m2",
    "w_mx6_a_mx6": "mx6",
    "w_mx9_a_mx9": "mx9",
    "w_mxfp8_a_mxfp8": "mxfp8",
    "w_mx_fp8_a_mx_fp8": "mxfp8",
    "w_mx_fp4_a_mx_fp4_sym": "mxfp4",
    "w_mxfp4_a_mxfp4_sym": "mxfp4",
    "w_mx_fp4_a_mx_fp6_sym": "mxfp4_mxfp6_e2m3",
    "w_fp8_per_channel_static_a_fp8_per_token_dynamic": "ptpc_fp8",
    "w_uint4_a_bfloat16_per_group_asym": "uint4_wo_{group}",
    "w_bfp16_a_bfp16": "bfp16",
    "w_bfp16": "bfp16",
    "fp4_block16_scale_e4m3": "nvfp4",
}
#: The schemes of earlier generations that have no successor.
_EARLIER_ALONE: dict[str, LayerSpec] = {
    "no_quant": LayerSpec(),
    "w_int8_per_tensor_sym": LayerSpec(_INT8),
    "w_mxfp8": LayerSpec(TensorSpec("mxfp8e4m3")),
    "w_mx_fp8": LayerSpec(TensorSpec("mxfp8e4m3")),
    "w_mxfp6_e3m2": LayerSpec(_MXFP6_E3M2),
    "w_mxfp6_e2m3": LayerSpec(_MXFP6_E2M3),
    "w_mx_fp6_e3m2_sym": LayerSpec(_MXFP6_E3M2),
    "w_mx_fp6_e2m3_sym": LayerSpec(_MXFP6_E2M3),
    "w_mxfp4_a_mxfp6_e3m2": LayerSpec(_MXFP4, _MXFP6_E3M2),
    "w_mxfp4_a_mxfp8": LayerSpec(_MXFP4, TensorSpec("mxfp8e4m3")),
    "w_mxint8": LayerSpec(TensorSpec("mxint8")),
    "w_mx6": LayerSpec(TensorSpec("mx6")),
}
#: Names of formats in other tools, with the closest scheme.
_COMMON_NAMES = {
    "w4a16": "int4_wo_128",
    "w8a8": "int8_per_channel",
    "w8a8_fp8": "ptpc_fp8",
    "fp4": "mxfp4",
    "fp6": "mxfp6_e2m3",
    "int2": "uint2_wo_128",
}
#: Schemes of AMD Quark that are not offered, and why.
_BROKEN = "AMD Quark 0.13 computes wrong values by it, and loads none of its checkpoints; choose"
_REFUSED = {
    "amdfp4_global16": f"{_BROKEN} amdfp4",
    "amdfp4_global32": f"{_BROKEN} amdfp4_g32",
}


def scheme(name: str, group_size: int | None = None) -> LayerSpec:
    """Return the layer specification of a scheme.

    Args:
        name: key of ``SCHEMES``, or AMD Quark's name of a scheme before release 0.11.
        group_size: values per group, for names without a fixed size; 128 if None.

    Raises:
        ConfigError: the scheme is unknown.

    >>> str(scheme("w_uint4_per_group_asym", 32).weight)
    'uint4 asymmetric blocks of 32 model scales nearest'
    """
    known = _EARLIER.get(name, name)
    # A name without a size stands for a family of schemes.
    if "{group}" in known:
        return _grouped_scheme(known, group_size or 128)
    if group_size and known in SCHEMES:
        _check_group_size(name, SCHEMES[known], group_size)
    if known in _EARLIER_ALONE:
        return _EARLIER_ALONE[known]
    if known in _REFUSED:
        raise ConfigError(f"the scheme {name} is not offered: {_REFUSED[known]}")
    if known not in SCHEMES:
        raise ConfigError(f"unknown scheme {name!r}{_nearest_scheme(name)}")
    return SCHEMES[known]


def groupings(spec: LayerSpec) -> dict[str, LayerSpec]:
    """Return the schemes that equal a specification up to the group size of the weights.

    Greater groups come first, and a scale per channel last. The specification itself is among them
    if it is that of a scheme; formats with blocks of a fixed size have no others.

    >>> list(groupings(SCHEMES["int4_wo_32"]))
    ['int4_wo_128', 'int4_wo_64', 'int4_wo_32', 'int4_wo_per_channel']
    """
    if spec.weight is None or not (spec.weight.block_size or spec.weight.per_channel):
        return {}
    alike = {
        name: other
        for name, other in SCHEMES.items()
        if _with_group_of(other, spec) == spec
    }
    return dict(sorted(alike.items(), key=lambda item: -_group(item[1])))


def fitting(spec: LayerSpec, widths: Collection[int]) -> list[str]:
    """Return the schemes of ``groupings`` in groups that divide all widths, greatest first.

    Args:
        spec: how layers are quantized.
        widths: numbers of inputs of the layers.

    >>> fitting(SCHEMES["uint4_wo_128"], [192, 512])
    ['uint4_wo_64', 'uint4_wo_32']
    """
    return [
        name
        for name, other in groupings(spec).items()
        if _group(other) and not any(width % _group(other) for width in widths)
    ]


def _group(spec: LayerSpec) -> int:
    return spec.weight.group if spec.weight is not None else 0


def _with_group_of(spec: LayerSpec, other: LayerSpec) -> LayerSpec | None:
    """Return a specification with the group size of another; None for other number formats.

    The type of the scales, which a layout chooses, and the calibrator are those of the other.
    """
    one, two = spec.weight, other.weight
    if one is None or two is None or one.dtype != two.dtype:
        return None
    changed = one.with_(
        block_size=two.block_size,
        per_channel=two.per_channel,
        scale=two.scale,
        calibrator=two.calibrator,
    )
    return spec.with_(weight=changed)


def _grouped_scheme(pattern: str, group_size: int) -> LayerSpec:
    """Return the scheme of a name with "{group}" in place of the values per group, of any size."""
    fixed = pattern.replace("{group}", str(group_size))
    if fixed in SCHEMES:
        return SCHEMES[fixed]
    weight = SCHEMES[pattern.replace("{group}", "128")].weight
    assert weight is not None  # these schemes have nothing but weights
    return LayerSpec(weight.with_(block_size=group_size))


def _check_group_size(name: str, spec: LayerSpec, group_size: int) -> None:
    """Raise ConfigError if the blocks of a scheme have another size than the user asks for."""
    if spec.weight is not None and spec.weight.group not in (0, group_size):
        raise ConfigError(
            f"group_size is {group_size}, but the scheme {name} has blocks of {spec.weight.group}",
        )


def _nearest_scheme(name: str) -> str:
    """Return the end of an error message: the known scheme that is closest to a name.

    A scheme of the same number format has priority. A name without a group size gets groups of 128,
    the size of most checkpoints.

    >>> _nearest_scheme("int4")
    "; did you mean 'int4_wo_128'? 'quark-onnx list schemes' has all"
    """
    # Other tools write hyphens, and AMD Quark underscores.
    closest = _closest_scheme(name.lower().replace("-", "_"))
    hint = f"; did you mean {closest!r}?" if closest else ";"
    return f"{hint} 'quark-onnx list schemes' has all"


def _closest_scheme(word: str) -> str:
    """Return the known scheme that is closest to a word; empty if none is."""
    if word in _COMMON_NAMES:
        return _COMMON_NAMES[word]
    # The number format stands anywhere in the name: int4 in w_int4_g128.
    dtype = re.search(r"(uint|int|mxfp|nvfp|amdfp|fp)\d", word)
    if dtype is not None:
        alike = [name for name in SCHEMES if name.startswith(dtype[0])]
        if alike:
            return _closest_of_format(word, dtype[0], alike)
    known = [*SCHEMES, *_EARLIER, *_EARLIER_ALONE]
    return next(iter(get_close_matches(word, known, n=1)), "")


def _closest_of_format(word: str, dtype: str, names: list[str]) -> str:
    """Return the name closest to a word, of one or more names that begin with a number format."""
    if word != dtype:
        # With no similar name, suggest a scheme of the same number format.
        return next(iter(get_close_matches(word, names, n=1)), names[0])
    # A bare number format: weight-only in groups of 128 is the usual choice.
    usual = f"{dtype}_wo_128"
    if usual in names:
        return usual
    return names[0]
