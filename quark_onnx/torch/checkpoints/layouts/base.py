"""Base class of checkpoint layouts: names and storage of quantized layers."""

from __future__ import annotations

import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

import torch

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.common.wording import counted
from quark_onnx.dtypes import Integer
from quark_onnx.torch.config.number_formats import TwoLevel
from quark_onnx.torch.config.schemes import fitting, groupings
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.affine import Params, explicit_zero, implicit_zero
from quark_onnx.torch.formats.bit_packing import in_blocks
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.quantized_layer import QuantizedLayer, Rounding

#: The scale of keys or values, named as output of its projection; renamed to a tensor of
#: the attention module.
_PROJECTION = re.compile(r"(?P<attention>.*)\.(?P<side>[kv])_proj\.output_scale")
#: The tolerated relative rounding error of scales in float16.
#: Normal numbers lose at most 2^-11, subnormal numbers more.
_HALF_LOSS = 1e-3


class Layout(ABC):
    """Layout of a checkpoint with quantized layers.

    Attributes:
        name: name of the layout.
        method: ``quant_method`` of config.json.
        parts: ends of the names of a weight's tensors.
        keeps_names: whether clients find experts only by the names in float checkpoints of the
            model.
        whole_groups: whether the groups of a weight must divide its inputs.
        caches: whether clients read the scales of keys and values, which are those of an fp8 cache.
    """

    name: ClassVar[str]
    method: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    keeps_names: ClassVar[bool] = True
    whole_groups: ClassVar[bool] = True
    caches: ClassVar[bool] = False

    @abstractmethod
    def refusal(self, spec: LayerSpec) -> str:
        """Return why the layout does not support a layer; empty if it does."""

    def cache_refusal(self, spec: TensorSpec) -> str:
        """Return why the layout does not support scales of keys and values.

        Empty if the layout supports them: E4M3 with per-tensor scales, if the layout has scales of
        keys and values at all.
        """
        if not self.caches:
            return "keys and values stay float there"
        is_supported = spec.dtype.name == "fp8e4m3" and spec.per_tensor
        return "" if is_supported else "it has fp8e4m3 for keys and values"

    def adapted(self, config: TorchConfig) -> TorchConfig:
        """Return the configuration with weight scales in their stored type."""
        return config

    def check_layer(
        self,
        name: str,
        kind: str,
        spec: LayerSpec,
        shape: tuple[int, ...],
    ) -> None:
        """Raise ConfigError unless a layer is a Linear with whole groups.

        Among the outputs, only those of ``k_proj`` and ``v_proj`` may be quantized.

        Args:
            name: name of the layer.
            kind: class name of the layer.
            spec: how the layer is quantized.
            shape: shape of the weight, (outputs, inputs).
        """
        if kind != "Linear":
            raise ConfigError(
                f"{name} is a {kind}, and the layout {self.name!r} has a place for Linear"
                " layers alone; exclude it, or choose the layout 'quark'",
            )
        self.check_groups({name: (spec, shape[-1])})
        # The other supported layouts have outputs for the KV cache alone.
        if spec.output is not None and not _PROJECTION.fullmatch(
            f"{name}.output_scale"
        ):
            raise ConfigError(
                f"the output of {name} is quantized, and the layout {self.name!r} has a place"
                " for those of k_proj and v_proj alone; choose the layout 'quark'",
            )

    def check_groups(self, layers: Mapping[str, tuple[LayerSpec, int]]) -> None:
        """Raise ConfigError if groups do not divide the inputs of layers, and they must.

        The message names the schemes of the layout that fit all layers of the specification.

        Args:
            layers: specifications and numbers of inputs of the quantized layers, by name.
        """
        if not self.whole_groups:
            return
        for spec in dict.fromkeys(spec for spec, _ in layers.values()):
            group = spec.weight.group if spec.weight is not None else 0
            alike = {
                name: width for name, (other, width) in layers.items() if other == spec
            }
            odd = [name for name, width in alike.items() if group and width % group]
            if odd:
                raise ConfigError(
                    f"{odd[0]} has {alike[odd[0]]} inputs, which blocks of {group} do not"
                    f" divide ({len(odd)} of {counted(len(alike), 'layer')}), and the layout"
                    f" {self.name!r} has a place for whole blocks alone;"
                    f" {self._other_groups(spec, set(alike.values()))}"
                )

    def _other_groups(self, spec: LayerSpec, widths: set[int]) -> str:
        """Return the advice for groups that do not divide inputs."""
        others = groupings(spec)
        names = [
            *fitting(spec, widths),
            *(name for name, other in others.items() if not _is_grouped(other)),
        ]
        names = [name for name in names if not self.refusal(others[name])]
        if not names:
            return "no scheme of this format fits; choose another one, or exclude the layers"
        return f"choose a scheme that fits: {', '.join(names)}"

    @abstractmethod
    def quantization_config(
        self,
        quantized: Mapping[str, LayerSpec],
        floats: Sequence[str],
        config: TorchConfig,
    ) -> dict[str, Any]:
        """Return the quantization_config of config.json.

        Args:
            quantized: specifications of the quantized layers, by name.
            floats: names of the float layers.
            config: configuration of the model.

        Raises:
            ConfigError: layers differ in a setting that the layout has once per model.
        """

    @abstractmethod
    def stored(self, weight: Quantized, spec: LayerSpec) -> dict[str, Any]:
        """Return the tensors of a weight, by the end of their names.

        Raises:
            ConfigError: the layout's types cannot represent the tensors.
        """

    def stored_scale(self, side: str, rounding: Rounding) -> dict[str, Any]:
        """Return the tensors of an activation scale, by the end of their names.

        Args:
            side: "input", "output" or "prob_output".
            rounding: module with the scale.
        """
        return {f"{side}_scale": rounding.scale}

    @abstractmethod
    def restored(
        self,
        parts: Mapping[str, Any],
        spec: LayerSpec,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Quantized:
        """Return the weight from the tensors of ``stored``.

        Args:
            parts: tensors by the end of their names.
            spec: how the layer is quantized.
            shape: shape of the weight.
            dtype: dtype of the dequantized weight.

        Raises:
            ModelError: a tensor is missing.
        """

    def restored_scale(
        self,
        side: str,
        spec: TensorSpec,
        get: Callable[[str], Any],
    ) -> Params:
        """Return the scale from the tensors of ``stored_scale``, of shape ().

        The zero point of integers is returned with it; zero points of 0 become None, as in a
        quantized model.

        Args:
            side: "input", "output" or "prob_output".
            spec: how the activation is quantized.
            get: function that returns a tensor by the end of its name, or None.

        Raises:
            ModelError: the scale is missing.
        """
        # Files have such scales in the shape () or (1,); FP8 has no zero points.
        zero = implicit_zero(get(f"{side}_zero_point"))
        scale = needed(get(f"{side}_scale"), f"{side}_scale").reshape(())
        return Params(scale, None if zero is None else zero.reshape(()))

    @classmethod
    @abstractmethod
    def read(cls, found: Mapping[str, Any]) -> tuple[TorchConfig, Layout]:
        """Return the configuration of a checkpoint, and its layout.

        The method is the inverse of ``quantization_config``.

        Raises:
            ConfigError: an entry is not supported.
        """

    def key(self, name: str) -> str:
        """Return the name of a tensor in files, for the name ``LAYER.END``.

        The scale of keys or values, ``ATTENTION.k_proj.output_scale``, is a tensor of its attention
        module in files: ``ATTENTION.k_scale``. Other names stay.
        """
        match = _PROJECTION.fullmatch(name)
        return f"{match['attention']}.{match['side']}_scale" if match else name

    def tensors(self, layer: QuantizedLayer, name: str) -> dict[str, Any]:
        """Return the tensors of a quantized layer, by the end of their names.

        Args:
            layer: the layer.
            name: name of the layer, for errors.

        Raises:
            ConfigError: the layout's types cannot represent the tensors.
        """
        weight = layer.quantized
        try:
            if weight is None:
                parts = {"weight": layer.float_weight}
            else:
                parts = self.stored(weight, layer.spec)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        if layer.bias is not None:
            parts["bias"] = layer.bias
        for side, rounding in (
            ("input", layer.input),
            ("output", layer.output),
            ("prob_output", layer.probabilities),
        ):
            # A dynamic scale is computed by each run, and not stored.
            if rounding is not None and rounding.scale is not None:
                parts |= self.stored_scale(side, rounding)
        return parts


def _is_grouped(spec: LayerSpec) -> bool:
    return spec.weight is not None and spec.weight.group > 0


def needed(tensor: torch.Tensor | None, name: str) -> torch.Tensor:
    """Return a tensor, or raise an error for None.

    Raises:
        ModelError: the tensor is None.
    """
    if tensor is None:
        raise ModelError(f"there is no {name!r}")
    return tensor


def part_of(parts: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return a tensor of a weight by the end of its name.

    Raises:
        ModelError: there is no such tensor.
    """
    return needed(parts.get(name), name)


def group_sizes(
    quantized: Mapping[str, LayerSpec], *, ungrouped: int = 0
) -> dict[str, int]:
    """Return the group sizes of quantized weights, by layer name.

    Args:
        quantized: specifications of the quantized layers, by name.
        ungrouped: size that stands for weights without groups.
    """
    return {
        name: spec.weight.group or ungrouped
        for name, spec in quantized.items()
        if spec.weight is not None
    }


def small_integers(spec: LayerSpec) -> str:
    """Return why a layer is not weight-only with 4-bit integers; empty if it is.

    The integers have per-group or per-channel scales.
    """
    weight = spec.weight
    if weight is None or spec.input is not None or spec.output is not None:
        return "it has weights alone"
    if not isinstance(weight.dtype, Integer) or weight.dtype.bits != 4:
        return "it has integers of 4 bits alone"
    if weight.per_tensor:
        return "it has scales for blocks, or for outputs"
    return ""


def unsigned(weight: Quantized) -> tuple[Any, Any]:
    """Return unsigned codes (outputs, inputs), zero points (outputs, blocks); int32."""
    below = _below(weight.spec)
    zero = in_columns(explicit_zero(weight.zero, weight.scale), weight)
    # In int32, since 8-bit codes plus 128 exceed int8.
    return weight.matrix.to(torch.int32) + below, zero.to(torch.int32) + below


def from_unsigned(
    codes: torch.Tensor,
    zero: torch.Tensor | None,
    scale: torch.Tensor,
    spec: TensorSpec,
    like: tuple[tuple[int, ...], Any],
) -> Quantized:
    """Return the weight of unsigned codes and zero points.

    Args:
        codes: unsigned codes of shape (outputs, inputs).
        zero: zero points of shape (outputs, blocks); None for the middle of the range.
        scale: scales of shape (outputs, blocks).
        spec: how the weight is quantized.
        like: shape and dtype of the weight.
    """
    below = _below(spec)
    # In int32, since a negative code does not fit into the uint8 of unpacked codes.
    codes = (codes.to(torch.int32) - below).to(torch.int8 if below else torch.uint8)
    if zero is None:
        zero = torch.full_like(scale, 1 << spec.dtype.bits - 1)
    zero = zero.float() - below
    # A scale per row is one block per row in files: (outputs, 1).
    if not spec.group:
        scale, zero = scale[:, 0], zero[:, 0]
    codes = in_blocks(codes, spec.group)
    shape, dtype = like
    return Quantized(spec, shape, codes, scale, implicit_zero(zero), None, dtype)


def _below(spec: TensorSpec) -> int:
    """Return the number of negative codes."""
    if spec.grid.qmin < 0:
        return 1 << spec.dtype.bits - 1
    return 0


def in_columns(scale: torch.Tensor, weight: Quantized) -> torch.Tensor:
    """Return per-tensor, per-channel or per-group scales as (outputs, blocks)."""
    if scale.ndim < 2:
        # A single scale is repeated for each output.
        return scale.expand(weight.shape[0])[:, None]
    return scale


def in_half(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in float16.

    Raises:
        ConfigError: float16 cannot represent the scales.
    """
    half = scale.to(torch.float16)
    # Compared in float64, which holds all types of scales exactly. An overflow gives infinity,
    # which is never close.
    is_close = torch.isclose(half.double(), scale.double(), rtol=_HALF_LOSS, atol=0.0)
    if not is_close.all():
        raise ConfigError(
            f"scales lie between {scale.min():.3g} and {scale.max():.3g}, which float16"
            " cannot hold; quantize with TensorSpec(..., scale='float16')",
        )
    return half


def with_scales(config: TorchConfig, kind: str) -> TorchConfig:
    """Return a configuration whose weight scales have another type than the model.

    Args:
        config: the configuration; types of scales that a user has chosen stay.
        kind: name of the type, as in ``TensorSpec.scale``.
    """

    def of(spec: LayerSpec) -> LayerSpec:
        weight = spec.weight
        if weight is None or weight.scale != "model":
            return spec
        return spec.with_(weight=weight.with_(scale=kind))

    return config.each(of)


def the_one(layout: str, what: str, found: Mapping[str, Any]) -> Any:
    """Return the common value of layers.

    Args:
        layout: name of the layout.
        what: meaning of the values, for the error.
        found: values by layer name.

    Raises:
        ConfigError: two layers differ, or ``found`` is empty.
    """
    if not found:
        raise ConfigError(
            f"no layer is quantized, which the layout {layout!r} has no words for; copy"
            " the folder",
        )
    first_name = next(iter(found))
    for name, value in found.items():
        if value != found[first_name]:
            raise ConfigError(
                f"{first_name} has {what} {found[first_name]}, and {name} {value}; the layout"
                f" {layout!r} has one for all layers. Give them the same, or choose the"
                " layout 'compressed-tensors' or 'quark'",
            )
    return found[first_name]


def check_parts_of_names(
    layout: str,
    quantized: Mapping[str, LayerSpec],
    floats: Sequence[str],
    is_named: Callable[[str, str], bool] = operator.contains,
) -> None:
    """Raise ConfigError if a float layer's name is part of a quantized layer's name.

    Clients would take both layers for float.

    Args:
        layout: name of the layout.
        quantized: the quantized layers.
        floats: names of the float layers.
        is_named: whether the name of a quantized layer, given first, is matched by that of a float
            layer. By default clients look for the name of the float layer within other names.
    """
    for float_name, name in product(floats, quantized):
        if is_named(name, float_name):
            raise ConfigError(
                f"{float_name} stays float, and its name is a part of {name}: what reads the"
                f" layout {layout!r} would take both for float; choose the layout"
                " 'compressed-tensors' or 'quark'",
            )


def is_two_level(spec: TensorSpec | None) -> bool:
    """Return whether a format has block scales and a global scale."""
    return spec is not None and isinstance(spec.dtype, TwoLevel)
