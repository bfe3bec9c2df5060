"""Layout: how a checkpoint names and stores quantized layers, and what its config.json says of
them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from quark_onnx.dtypes import Integer
from quark_onnx.errors import ConfigError, ModelError
from quark_onnx.torch.config.number_formats import TwoLevel
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.bit_packing import in_blocks
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.quantized_layer import QuantizedLayer, Rounding

#: The scale of keys or values as the output of the layer that computes them, and as a tensor of
#: their attention.
_PROJECTION = re.compile(r"(?P<attention>.*)\.(?P<side>[kv])_proj\.output_scale")
#: How much of a scale float16 may lose by rounding.
_HALF_LOSS = 1e-3


class Layout(ABC):
    """How a checkpoint stores quantized layers.

    Attributes:
        name: what it is asked for by.
        method: the ``quant_method`` of its config.json.
        parts: how the names of a weight's tensors end.
        keeps_names: whether what reads it finds experts only where float checkpoints of their model
            have them apart.
    """

    name: ClassVar[str]
    method: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    keeps_names: ClassVar[bool] = True

    @abstractmethod
    def refusal(self, spec: LayerSpec) -> str:
        """Why there is no place for a layer that is quantized so; empty if there is one."""

    def cache_refusal(self, spec: TensorSpec) -> str:
        """Why there is no place for scales of keys and values that are kept so.

        Empty if there is one.
        """
        return "keys and values stay float there"

    def adapted(self, config: TorchConfig) -> TorchConfig:
        """The configuration with scales of weights in the type that they are stored in."""
        return config

    @abstractmethod
    def check_layer(
        self,
        name: str,
        kind: str,
        spec: LayerSpec,
        shape: tuple[int, ...],
    ) -> None:
        """Raise ConfigError if a layer of this class and shape has no place."""

    @abstractmethod
    def quantization_config(
        self,
        quantized: Mapping[str, LayerSpec],
        floats: Sequence[str],
        config: TorchConfig,
    ) -> dict[str, Any]:
        """What config.json says of the quantization.

        Args:
            quantized: the layers that are, by name.
            floats: names of the layers that are not.
            config: what all was quantized by.

        Raises:
            ConfigError: the layers differ in what can be said of all of them only.
        """

    @abstractmethod
    def stored(self, weight: Quantized, spec: LayerSpec) -> dict[str, Any]:
        """The tensors of a weight, by the end of their names.

        Raises:
            ConfigError: they cannot be of the types that the layout has for them.
        """

    def stored_scale(self, side: str, rounding: Rounding) -> dict[str, Any]:
        """The tensors of an activation whose scale is known, by the end of their names.

        Args:
            side: "input", "output" or "prob_output".
        """
        return {f"{side}_scale": rounding.scale}

    @abstractmethod
    def restored(
        self,
        parts: Mapping[str, Any],
        spec: LayerSpec,
        shape: tuple[int, ...],
        dtype: Any,
    ) -> Quantized:
        """The weight that ``stored`` made the tensors of; the type of their reals is ``dtype``.

        Raises:
            ModelError: a tensor is missing.
        """

    def restored_scale(
        self,
        side: str,
        spec: TensorSpec,
        get: Callable[[str], Any],
    ) -> Params:
        """The scale that ``stored_scale`` made the tensors of.

        Args:
            get: the tensor whose name ends so; None if there is none.
        """
        return Params(needed(get(f"{side}_scale"), f"{side}_scale").reshape(()))

    @classmethod
    @abstractmethod
    def read(cls, found: Mapping[str, Any]) -> tuple[TorchConfig, Layout]:
        """What a checkpoint was quantized by, and its layout.

        The inverse of ``quantization_config``.

        Raises:
            ConfigError: it says what cannot be understood.
        """

    def key(self, name: str) -> str:
        """How a tensor is called, which is ``LAYER.END`` elsewhere."""
        return name

    def tensors(self, layer: QuantizedLayer, name: str) -> dict[str, Any]:
        """The tensors of a quantized layer that is called so, by the end of their names.

        Raises:
            ConfigError: they cannot be of the types that the layout has for them.
        """
        weight = layer.quantized
        try:
            parts = (
                {"weight": layer.float_weight}
                if weight is None
                else self.stored(weight, layer.spec)
            )
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        if layer.bias is not None:
            parts["bias"] = layer.bias
        for side, rounding in (
            ("input", layer.input),
            ("output", layer.output),
            ("prob_output", layer.probabilities),
        ):
            if rounding is not None and rounding.scale is not None:
                parts |= self.stored_scale(side, rounding)
        return parts


def names_in(found: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The list of names that a configuration has; empty if it has none.

    Raises:
        ConfigError: it is something else.
    """
    names = found.get(key)
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"quantization_config has {key} {names!r}; it must be a list of names",
        )
    return tuple(names)


def needed(tensor: Any, name: str) -> Any:
    """The tensor itself.

    Raises:
        ModelError: there is none.
    """
    if tensor is None:
        raise ModelError(f"there is no {name!r}")
    return tensor


def cache_key(name: str) -> str:
    """The name of a tensor, where scales of keys and values belong to their attention.

    >>> cache_key("model.layers.0.self_attn.k_proj.output_scale")
    'model.layers.0.self_attn.k_scale'
    """
    found = _PROJECTION.fullmatch(name)
    return f"{found['attention']}.{found['side']}_scale" if found else name


def check_linear(
    layout: str,
    name: str,
    kind: str,
    spec: LayerSpec,
    shape: tuple[int, ...],
) -> None:
    """Raise ConfigError if a layer is no Linear, its blocks do not fill its rows, or its output has
    no name.
    """
    if kind != "Linear":
        raise ConfigError(
            f"{name} is a {kind}, and the layout {layout!r} has a place for Linear"
            " layers alone; exclude it, or choose the layout 'quark'",
        )
    group = spec.weight.group if spec.weight is not None else 0
    if group and shape[-1] % group:
        raise ConfigError(
            f"{name} is {list(shape)}, and the layout {layout!r} has a place for whole"
            f" blocks of {group} alone; choose another size, exclude this layer, or"
            " choose the layout 'quark'",
        )
    if spec.output is not None and not _PROJECTION.fullmatch(f"{name}.output_scale"):
        raise ConfigError(
            f"the output of {name} is quantized, and the layout {layout!r} has a place"
            " for those of k_proj and v_proj alone; choose the layout 'quark'",
        )


def small_integers(spec: LayerSpec) -> str:
    """Why a layer is not one whose weight alone is quantized, as integers of 4 bits in blocks or
    for each output.
    """
    weight = spec.weight
    if weight is None or spec.input is not None or spec.output is not None:
        return "it has weights alone"
    if not isinstance(weight.dtype, Integer) or weight.dtype.bits != 4:
        return "it has integers of 4 bits alone"
    return (
        ""
        if weight.group or weight.per_channel
        else "it has scales for blocks, or for outputs"
    )


def unsigned(weight: Quantized) -> tuple[Any, Any]:
    """Codes of integers as (outputs, inputs) and their zero points as (outputs, blocks), both from
    0 on; int32.
    """
    below = _below(weight.spec)
    zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero
    return (
        weight.matrix.to(torch.int32) + below,
        in_columns(zero, weight).to(
            torch.int32,
        )
        + below,
    )


def from_unsigned(
    codes: Any,
    zero: Any,
    scale: Any,
    spec: TensorSpec,
    like: tuple[tuple[int, ...], Any],
) -> Quantized:
    """The weight of such codes and zero points, which are None where they lie in the middle.

    Args:
        scale: as (outputs, blocks).
        like: shape and type of the weight.
    """
    below = _below(spec)
    codes = (codes.to(torch.int32) - below).to(torch.int8 if below else torch.uint8)
    zero = torch.full_like(scale, 1 << spec.dtype.bits - 1) if zero is None else zero
    zero = zero.float() - below
    if not spec.group:
        scale, zero = scale[:, 0], zero[:, 0]
    codes = in_blocks(codes, spec.group) if spec.group else codes
    return Quantized(
        spec,
        like[0],
        codes,
        scale,
        zero if bool(zero.any()) else None,
        None,
        like[1],
    )


def _below(spec: TensorSpec) -> int:
    """How many codes lie below 0."""
    return 1 << spec.dtype.bits - 1 if spec.grid.qmin < 0 else 0


def in_columns(scale: Any, weight: Quantized) -> Any:
    """Scales of a tensor, of outputs or of blocks as (outputs, blocks)."""
    return scale.expand(weight.shape[0])[:, None] if scale.ndim < 2 else scale


def in_half(scale: Any) -> Any:
    """Scales in float16.

    Raises:
        ConfigError: that type has no such numbers.
    """
    half = scale.to(torch.float16)
    if not torch.isclose(
        half.double(),
        scale.double(),
        rtol=_HALF_LOSS,
        atol=0.0,
    ).all():
        raise ConfigError(
            f"scales lie between {scale.min():.3g} and {scale.max():.3g}, which float16"
            " cannot hold; quantize with TensorSpec(..., scale='float16')",
        )
    return half


def with_scales(config: TorchConfig, kind: str) -> TorchConfig:
    """A configuration whose scales of weights are of another type than the model."""

    def of(spec: LayerSpec) -> LayerSpec:
        weight = spec.weight
        return (
            spec
            if weight is None or weight.scale != "model"
            else spec.with_(weight=weight.with_(scale=kind))
        )

    own = {
        name: tuple((key, of(spec)) for key, spec in getattr(config, name))
        for name in ("layers", "types")
    }
    return config.with_(default=of(config.default), **own)


def the_one(layout: str, what: str, found: Mapping[str, Any]) -> Any:
    """The value that all layers have.

    Args:
        layout: the name of the layout.
        what: what the values are, for the error.
        found: values by names of layers.

    Raises:
        ConfigError: two layers differ, or there are none.
    """
    if not found:
        raise ConfigError(
            f"no layer is quantized, which the layout {layout!r} has no words for; copy"
            " the folder",
        )
    first = next(iter(found))
    for name, value in found.items():
        if value != found[first]:
            raise ConfigError(
                f"{first} has {what} {found[first]}, and {name} {value}; the layout"
                f" {layout!r} has one for all layers. Give them the same, or choose the"
                " layout 'compressed-tensors' or 'quark'",
            )
    return found[first]


def check_parts_of_names(
    layout: str,
    quantized: Mapping[str, LayerSpec],
    floats: Sequence[str],
) -> None:
    """Raise ConfigError if the name of a float layer is a part of a quantized one's: clients take
    both for float.
    """
    for name in floats:
        other = next((other for other in quantized if name in other), None)
        if other is not None:
            raise ConfigError(
                f"{name} stays float, and its name is a part of {other}: what reads the"
                f" layout {layout!r} would take both for float; choose the layout"
                " 'compressed-tensors' or 'quark'",
            )


def is_two_level(spec: TensorSpec | None) -> bool:
    """Whether blocks and the tensor have a scale each."""
    return spec is not None and isinstance(spec.dtype, TwoLevel)
