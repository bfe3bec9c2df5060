"""The layout of compressed-tensors, which vLLM and transformers read.

llm-compressor writes the same layout. Layers with equal specification are a group of config.json.
The largest group has the target Linear; other groups and the float layers are lists of names.
Integers are always signed in this layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from quark_onnx.common.containers import grouped
from quark_onnx.common.errors import ConfigError
from quark_onnx.dtypes import Integer
from quark_onnx.torch.checkpoints.entries import names_in
from quark_onnx.torch.checkpoints.layouts.base import (
    Layout,
    from_unsigned,
    in_columns,
    is_two_level,
    needed,
    part_of,
    unsigned,
)
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import KVCache, TorchConfig
from quark_onnx.torch.formats.affine import Params, explicit_zero
from quark_onnx.torch.formats.bit_packing import (
    in_blocks,
    pack_bits,
    pack_words,
    unpack_bits,
    unpack_words,
)
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.quantized_layer import Rounding

PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
_MX = {"mxfp4e2m1": MXFP4, "mxfp8e4m3": MXFP8}


def format_of(spec: LayerSpec) -> str:
    """Return the name of the format that stores a layer; empty if unsupported.

    >>> format_of(LayerSpec(TensorSpec("uint4", symmetric=False, block_size=32)))
    'pack-quantized'
    """
    weight, read = spec.weight, spec.input
    # Callers remove the outputs of k_proj and v_proj, which are the KV cache. Other outputs have no
    # format.
    if weight is None or spec.output is not None:
        return ""
    if isinstance(weight.dtype, Integer):
        return _integer_format(weight, read)
    form = _float_format(weight)
    if not form or read is None:
        return form
    return form if _is_multiplied(form, weight, read) else ""


def _float_format(weight: TensorSpec) -> str:
    """Return the name of the format that stores codes of floats; empty if unsupported."""
    if is_two_level(weight):
        return NVFP4
    # These codes have a scale for each tensor or output.
    if weight.dtype.name == "fp8e4m3" and not weight.group:
        return FLOATS
    return _MX.get(weight.dtype.name, "")


def _is_multiplied(form: str, weight: TensorSpec, read: TensorSpec) -> bool:
    """Return whether vLLM multiplies inputs with weights of a format."""
    if form == NVFP4:
        return is_two_level(read) and read.measured
    if form == FLOATS:
        return read.dtype == weight.dtype and not read.group
    # The exponents of microscaling inputs are chosen at runtime, by one rule.
    return (read.dtype, read.exponent) == (weight.dtype, "even")


def _integer_format(weight: TensorSpec, read: TensorSpec | None) -> str:
    """Return the name of the format of integer weights; empty if unsupported by vLLM."""
    if weight.dtype.bits > 8:
        return ""
    if read is None:
        return PACKED
    if not isinstance(read.dtype, Integer) or read.dtype.bits not in (4, 8):
        return ""
    per_token_or_group = _is_per_token_or_group(read)
    if _is_ungrouped_w8a8(weight, read):
        form, is_read = INTEGERS, per_token_or_group or not read.dynamic
    else:
        form, is_read = PACKED, per_token_or_group and not weight.per_tensor
    return form if is_read else ""


def _is_per_token_or_group(read: TensorSpec) -> bool:
    """Return whether an input has signed codes, and a scale for each token or group."""
    is_signed = read.symmetric and read.grid.qmin < 0
    return is_signed and read.dynamic and not read.per_tensor


def _is_ungrouped_w8a8(weight: TensorSpec, read: TensorSpec) -> bool:
    """Return whether weight and input are ungrouped 8-bit integers, and the weight symmetric."""
    if weight.group or read.group:
        return False
    return weight.symmetric and weight.dtype.bits == read.dtype.bits == 8


@dataclass(frozen=True)
class CompressedTensorsLayout(Layout):
    """The layout of compressed-tensors."""

    name: ClassVar[str] = "compressed-tensors"
    method: ClassVar[str] = "compressed-tensors"
    caches: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_global_scale",
    )

    def refusal(self, spec: LayerSpec) -> str:
        """Return why ``format_of`` finds no format for a layer; empty if there is one.

        The formats are those that vLLM reads: integers of up to 8 bits, E4M3 with per-tensor or
        per-channel scales, NVFP4, MXFP4 and MXFP8, each with the inputs that vLLM multiplies with
        such weights.
        """
        if format_of(spec):
            return ""
        return "vLLM reads none of its formats with such weights, inputs and outputs"

    def quantization_config(
        self,
        quantized: Mapping[str, LayerSpec],
        floats: Sequence[str],
        config: TorchConfig,
    ) -> dict[str, Any]:
        """Return the configuration that ``CompressedTensorsConfig`` of vLLM and transformers reads.

        Layers with equal specification are one entry of ``config_groups``. The largest group has
        the target "Linear", and the names of heads. Other groups, and the float layers in
        ``ignore``, are exact names. ``format`` is "mixed-precision" if the groups have different
        formats. ``config`` contributes ``kv_cache_scheme`` only.

        Raises:
            ConfigError: no layer is quantized.
        """
        # outputs are the KV cache, which has a key of its own
        members = grouped(
            (spec.with_(output=None), name) for name, spec in quantized.items()
        )
        if not members:
            raise ConfigError(
                "no layer is quantized, which the layout 'compressed-tensors' has no"
                " words for",
            )
        # The name of a layer has priority over the name of its class. So the class stands for the
        # group that would be the longest list of names.
        largest = max(members, key=lambda spec: len(members[spec]))
        # vLLM has another class for heads, and finds them by name alone.
        heads = [
            name
            for name in members.pop(largest)
            if name.rpartition(".")[2] == "lm_head"
        ]
        targets = members | {largest: ["Linear", *heads]}
        groups = dict[str, Any]()
        for spec, names in targets.items():
            groups[f"group_{len(groups)}"] = _group(spec, names)
        formats = {format_of(spec) for spec in targets}
        cache = None if config.kv_cache is None else config.kv_cache.spec
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "config_groups": groups,
            "ignore": list(floats),
            "kv_cache_scheme": _arguments(cache),
        }

    def stored(self, weight: Quantized, spec: LayerSpec) -> dict[str, Any]:
        """Return the tensors of the format that ``format_of`` names for the layer.

        Returns:
            By format:

            - pack-quantized: ``weight_packed`` int32 (outputs, ceil(inputs * bits / 32)),
              ``weight_scale`` (outputs, groups), ``weight_shape`` (2,), and for asymmetric integers
              ``weight_zero_point`` int32 (ceil(outputs * bits / 32), groups). A per-tensor scale is
              repeated for each output.
            - int-quantized: ``weight`` int8 (outputs, inputs), ``weight_scale`` (outputs, 1) or
              (1,).
            - float-quantized: ``weight`` E4M3 (outputs, inputs), ``weight_scale`` (outputs, 1) or
              (1,).
            - mxfp8-quantized: ``weight`` E4M3 (outputs, inputs), ``weight_scale`` E8M0 as uint8
              (outputs, blocks).
            - mxfp4-pack-quantized: ``weight_packed`` uint8 (outputs, inputs / 2), ``weight_scale``
              E8M0 as uint8 (outputs, blocks).
            - nvfp4-pack-quantized: ``weight_packed`` uint8 (outputs, inputs / 2), ``weight_scale``
              E4M3 (outputs, blocks), ``weight_global_scale`` float32 (1,), the reciprocal of the
              global scale.
        """
        return _STORED[format_of(spec.with_(output=None))](weight)

    def stored_scale(self, side: str, rounding: Rounding) -> dict[str, Any]:
        """Return the tensors of a static activation scale, each of shape (1,).

        Returns:
            For NVFP4, ``input_global_scale``: the reciprocal of the global scale, in float32.
            Otherwise ``input_scale``, and for asymmetric integers ``input_zero_point`` in int8.
            The zero point of unsigned codes is shifted, since the layout has signed codes. ``side``
            takes the place of "input" in the names.
        """
        assert rounding.scale is not None
        if is_two_level(rounding.spec):
            # Only the global scale is static; block scales of activations are computed at runtime.
            return {f"{side}_global_scale": _inverse(rounding.scale)}
        parts = {f"{side}_scale": rounding.scale.reshape(1)}
        if not rounding.spec.symmetric:
            zero = explicit_zero(rounding.zero, rounding.scale)
            # Unsigned codes are stored as signed codes, which lie 2^(bits - 1) lower, and the zero
            # point moves with them.
            if rounding.spec.grid.qmin >= 0:
                zero = zero - (1 << rounding.spec.dtype.bits - 1)
            parts[f"{side}_zero_point"] = zero.to(torch.int8).reshape(1)
        return parts

    def restored(
        self,
        parts: Mapping[str, Any],
        spec: LayerSpec,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Quantized:
        """Return the weight from the tensors of its format; the inverse of ``stored``.

        Raises:
            ModelError: a tensor is missing, or packed words do not hold the codes of ``shape``.
        """
        assert spec.weight is not None
        weight, form = spec.weight, format_of(spec.with_(output=None))
        scale = part_of(parts, "weight_scale")
        if form == PACKED:
            codes, zero = _unpacked(parts, weight, shape)
            return from_unsigned(codes, zero, scale, weight, (shape, dtype))
        global_scale = None
        if form in (MXFP4, NVFP4):
            codes = unpack_bits(part_of(parts, "weight_packed"), 4)
            # NVFP4 has it, MXFP4 does not.
            global_scale = parts.get("weight_global_scale")
        else:
            codes = part_of(parts, "weight")
        if global_scale is not None:
            global_scale = _inverse(global_scale).reshape(())
        if form == MXFP8:
            codes = codes.view(torch.uint8)
        if form in (INTEGERS, FLOATS):
            # The file has one scale as (1,), and scales of outputs as (outputs, 1).
            scale = scale.reshape((-1,) if weight.per_channel else ())
        blocks = in_blocks(codes, weight.group)
        return Quantized(weight, shape, blocks, scale, None, global_scale, dtype)

    def restored_scale(
        self,
        side: str,
        spec: TensorSpec,
        get: Callable[[str], Any],
    ) -> Params:
        """Return an activation scale of shape (), and its zero point for asymmetric integers.

        The scale of NVFP4 is the reciprocal of the stored ``input_global_scale``. Zero points
        belong to signed codes, as stored; a zero point of 0 becomes None.

        Raises:
            ModelError: the scale is missing.
        """
        if is_two_level(spec):
            end = f"{side}_global_scale"
            return Params(_inverse(needed(get(end), end)).reshape(()))
        return super().restored_scale(side, spec, get)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> tuple[TorchConfig, Layout]:
        """Return the configuration of compressed-tensors, and the layout.

        The group with the target "Linear" is the default; without such a group, layers that no
        group names stay float. Integers are signed. ``output_activations`` and ``format`` are not
        read.

        Raises:
            ConfigError: ``config_groups`` is missing, a target or an entry of ``ignore`` is a
                regular expression ("re:..."), or another entry is not supported.
        """
        floats = names_in(found, "ignore")
        # Without a group for the class Linear, layers that no group names stay float.
        default, layers = LayerSpec(), list[tuple[str, LayerSpec]]()
        for group in _groups_of(found):
            spec = LayerSpec(
                _spec(group.get("weights"), weight=True),
                _spec(group.get("input_activations")),
            )
            for target in names_in(group, "targets"):
                if target == "Linear":
                    default = spec
                else:
                    layers.append((target, spec))
        _check_names(*floats, *dict(layers))
        cache = _spec(found.get("kv_cache_scheme"))
        config = TorchConfig(
            default,
            layers=tuple(layers),
            exclude=floats,
            kv_cache=None if cache is None else KVCache(cache),
        )
        return config, cls()


def _group(spec: LayerSpec, targets: list[str]) -> dict[str, Any]:
    """Return the entry of config_groups for layers of a specification."""
    return {
        "targets": targets,
        "weights": _arguments(spec.weight, format_of(spec)),
        "input_activations": _arguments(spec.input),
        "output_activations": None,
        "format": format_of(spec),
    }


def _groups_of(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the groups of a configuration.

    Raises:
        ConfigError: there are none, or a group is no object.
    """
    groups = found.get("config_groups")
    members = list(groups.values()) if isinstance(groups, Mapping) else []
    if not members or not all(isinstance(group, Mapping) for group in members):
        raise ConfigError(
            f"quantization_config has config_groups {groups!r}; they must be"
            " objects by name",
        )
    return members


def _check_names(*names: str) -> None:
    """Raise ConfigError if a target or an ignored layer is a regular expression."""
    for name in names:
        if name.startswith("re:"):
            raise ConfigError(
                f"quantization_config has the pattern {name!r}; this reads names,"
                " and the class Linear",
            )


def _packed(weight: Quantized) -> dict[str, Any]:
    """Return integers of any width in int32 words (outputs, ceil(inputs * bits / 32))."""
    # Codes of (outputs, inputs) and zero points of (outputs, groups), both unsigned.
    spec, (codes, zero) = weight.spec, unsigned(weight)
    parts = {
        "weight_packed": pack_words(codes, spec.dtype.bits),
        "weight_scale": in_columns(weight.scale, weight).contiguous(),
        # The last word of a row is padded, so that its words do not tell the number of inputs.
        "weight_shape": torch.tensor(weight.shape),
    }
    if not spec.symmetric:
        # Packed along the outputs, to (outputs * bits / 32, groups).
        parts["weight_zero_point"] = (
            pack_words(zero.t(), spec.dtype.bits).t().contiguous()
        )
    return parts


def _integers(weight: Quantized) -> dict[str, Any]:
    """Return 8-bit integers (outputs, inputs) with scales (outputs, 1) or (1,)."""
    # uint8 with the zero point 128 becomes int8 without zero point.
    codes = unsigned(weight)[0] - (1 << weight.spec.dtype.bits - 1)
    return {"weight": codes.to(torch.int8), "weight_scale": _column(weight.scale)}


def _floats(weight: Quantized) -> dict[str, Any]:
    """Return E4M3 (outputs, inputs) with scales (outputs, 1) or (1,)."""
    return {"weight": weight.matrix, "weight_scale": _column(weight.scale)}


def _mxfp8(weight: Quantized) -> dict[str, Any]:
    """Return E4M3 (outputs, inputs) with E8M0 scales (outputs, blocks) as bytes."""
    # The codes are bit patterns, which the file has as F8_E4M3.
    codes = weight.matrix.contiguous().view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": weight.scale}


def _fp4(weight: Quantized) -> dict[str, Any]:
    """Return FP4 as bytes (outputs, inputs / 2) with scales (outputs, blocks)."""
    parts = {
        "weight_packed": pack_bits(weight.matrix, 4),
        "weight_scale": weight.scale,
    }
    # MXFP4 has no global scale.
    if weight.whole is None:
        return parts
    return parts | {"weight_global_scale": _inverse(weight.whole)}


#: Functions from the codes of a weight to the stored tensors, by the name of the format.
_STORED: dict[str, Callable[[Quantized], dict[str, Any]]] = {
    PACKED: _packed,
    INTEGERS: _integers,
    FLOATS: _floats,
    MXFP8: _mxfp8,
    MXFP4: _fp4,
    NVFP4: _fp4,
}


def _unpacked(
    parts: Mapping[str, Any], weight: TensorSpec, shape: tuple[int, ...]
) -> tuple[Any, Any]:
    """Return unsigned codes (outputs, inputs) from int32 words, and their zero points or None."""
    words, bits, zero = part_of(parts, "weight_packed"), weight.dtype.bits, None
    if not weight.symmetric:
        zero_words = part_of(parts, "weight_zero_point")
        # packed along the outputs, unlike the codes
        zero = unpack_words(zero_words.t(), bits, shape[0]).t()
    return unpack_words(words, bits, shape[1]), zero


def _column(scale: torch.Tensor) -> Any:
    """Return scales of shape (outputs, 1), or (1,) for a single scale."""
    if scale.ndim == 0:
        return scale.reshape(1)
    return scale[:, None]


def _inverse(whole: torch.Tensor) -> Any:
    """Return the reciprocal of a global scale."""
    # compressed-tensors stores the factor 448 * 6 / amax by which scales are multiplied, the
    # reciprocal of the global scale. In float64, so that only the last step rounds.
    return (1 / whole.double()).float().reshape(1)


def _arguments(spec: TensorSpec | None, form: str = "") -> dict[str, Any] | None:
    """Return the quantization arguments of a tensor, as in compressed-tensors.

    Args:
        form: name of the format of a weight; empty for activations.
    """
    if spec is None:
        return None
    is_integer = isinstance(spec.dtype, Integer)
    arguments: dict[str, Any] = {
        "num_bits": spec.dtype.bits,
        "type": "int" if is_integer else "float",
        # Floats have no zero point.
        "symmetric": spec.symmetric or not is_integer,
        "strategy": _strategy(spec, form),
        "group_size": spec.group or None,
        "dynamic": False if form else _dynamic(spec),
    }
    scale_dtype = _SCALE_DTYPES.get(spec.dtype.name)
    if scale_dtype is not None:
        arguments["scale_dtype"] = scale_dtype
    return arguments


#: Types of scales, of formats whose scales are no floats of the model's type.
_SCALE_DTYPES = {
    "nvfp4": "torch.float8_e4m3fn",
    **dict.fromkeys(_MX, "torch.uint8"),
}


def _strategy(spec: TensorSpec, form: str) -> str:
    """Return the name of the granularity of scales; ``form`` is empty for activations."""
    if is_two_level(spec):
        return "tensor_group"
    if spec.group:
        return "group"
    # the format of packed integers has no scale for a whole weight: it is stored for each output
    if spec.per_channel or form == PACKED:
        return "channel" if form else "token"
    return "tensor"


def _dynamic(spec: TensorSpec) -> bool | str:
    """Return the argument ``dynamic`` of an activation."""
    if is_two_level(spec):
        # Scales of blocks are computed at runtime, the global scale is stored.
        return "local"
    return not spec.measured


#: Strategies of formats with a scale for each tensor, output, token or group.
_STRATEGIES = ("tensor", "channel", "token", "group")
#: Formats by their type, num_bits, strategy and group_size.
_BLOCK_FORMATS = (
    (("float", 4, "group", 32), "mxfp4e2m1"),
    (("float", 8, "group", 32), "mxfp8e4m3"),
)


def _spec(found: Any, weight: bool = False) -> TensorSpec | None:
    """Return the specification of quantization arguments (inverse of ``_arguments``).

    Args:
        found: the arguments of a tensor; None for a float tensor.
        weight: whether the tensor is a weight, whose scale is never dynamic.

    Raises:
        ConfigError: an argument is not supported.
    """
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"quantization_config has {found!r} where it should say how a tensor is"
            " quantized",
        )
    # Defaults of QuantizationArgs in compressed-tensors.
    bits = found.get("num_bits", 8)
    kind = found.get("type", "int")
    strategy = found.get("strategy")
    size = found.get("group_size") or 0
    # The strategy of two levels of scales belongs to NVFP4 alone.
    if (kind, bits, strategy) == ("float", 4, "tensor_group"):
        return TensorSpec("nvfp4")
    for arguments, name in _BLOCK_FORMATS:
        if (kind, bits, strategy, size) == arguments:
            return TensorSpec(name)
    is_other_float = kind == "float" and bits != 8
    if strategy not in _STRATEGIES or is_other_float:
        raise ConfigError(
            f"quantization_config has {kind}{bits} with the strategy {strategy!r},"
            " which cannot be read",
        )
    dtype, symmetric = f"int{bits}", bool(found.get("symmetric", True))
    if kind == "float":
        dtype, symmetric = "fp8e4m3", True
    # The size belongs to groups alone.
    if strategy != "group":
        size = 0
    return TensorSpec(
        dtype,
        symmetric=symmetric,
        per_channel=strategy in ("channel", "token"),
        block_size=size,
        dynamic=bool(found.get("dynamic")) and not weight,
    )
