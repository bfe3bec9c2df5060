"""The "fp8" layouts: per-tensor E4M3 weights, and static or per-token activations.

The names of scales in vLLM and in transformers differ. Each client has its own layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.checkpoints.entries import names_in
from quark_onnx.torch.checkpoints.layouts.base import (
    Layout,
    check_parts_of_names,
    needed,
    part_of,
    the_one,
)
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import KVCache, TorchConfig
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.names import is_named_in_transformers
from quark_onnx.torch.models.quantized_layer import Rounding

if TYPE_CHECKING:
    import torch

_E4M3 = TensorSpec("fp8e4m3")
_TOKENS = _E4M3.with_(per_channel=True, dynamic=True)


def _is_whole(spec: TensorSpec) -> bool:
    """Return whether a specification is E4M3 with a per-tensor scale."""
    return spec.dtype == _E4M3.dtype and spec.per_tensor


def _activation_scheme(spec: LayerSpec) -> str:
    """Return the ``activation_scheme`` of a layer."""
    # A layer that was not run on the data has no input scale, and so no input here.
    if spec.input is None or spec.input.dynamic:
        return "dynamic"
    return "static"


@dataclass(frozen=True)
class Fp8Layout(Layout):
    """Layout of vLLM: ``weight_scale``, ``input_scale``, scales of keys and values.

    The names of scales are class attributes, which ``FinegrainedFp8Layout`` overrides.
    """

    name: ClassVar[str] = "fp8"
    method: ClassVar[str] = "fp8"
    parts: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_scale_inv")
    caches: ClassVar[bool] = True
    #: Names of the scales, and of the list of float layers.
    weight_scale: ClassVar[str] = "weight_scale"
    input_scale: ClassVar[str] = "input_scale"
    excluded: ClassVar[str] = "ignored_layers"

    def refusal(self, spec: LayerSpec) -> str:
        """Return why a layer has no fp8 scheme; empty if supported.

        Supported are E4M3 weights with a per-tensor scale, and E4M3 inputs with a static per-tensor
        scale or dynamic per-token scales. Weight-only layers and quantized outputs are refused.
        """
        if spec.weight is None or spec.input is None or spec.output is not None:
            return "it has weights and inputs, both"
        if not _is_whole(spec.weight):
            return "it has fp8e4m3 with one scale for a weight"
        # vLLM computes the scale of a token at runtime.
        is_scaled = (
            spec.input.per_channel if spec.input.dynamic else _is_whole(spec.input)
        )
        if spec.input.dtype == _E4M3.dtype and is_scaled:
            return ""
        return (
            "it has fp8e4m3 with one scale for inputs, from data, or one for each token"
        )

    def quantization_config(
        self,
        quantized: Mapping[str, LayerSpec],
        floats: Sequence[str],
        config: TorchConfig,
    ) -> dict[str, Any]:
        """Return the configuration of method "fp8", which vLLM's fp8.py reads.

        ``activation_scheme`` is "static" or "dynamic", for all layers. ``ignored_layers`` lists the
        float layers; transformers has the name ``modules_to_not_convert``. ``kv_cache_scheme`` is
        "static" if keys and values are quantized: vLLM does not read the entry, but ``read`` does.

        Raises:
            ConfigError: layers differ in ``activation_scheme``, or no layer is quantized.
        """
        kinds = {name: _activation_scheme(spec) for name, spec in quantized.items()}
        return {
            "quant_method": "fp8",
            "activation_scheme": the_one(self.name, "an activation_scheme", kinds),
            "weight_block_size": None,
            self.excluded: list(floats),
            "kv_cache_scheme": None if config.kv_cache is None else "static",
        }

    def stored(self, weight: Quantized, spec: LayerSpec) -> dict[str, Any]:
        """Return an E4M3 weight with its per-tensor scale.

        Returns:
            ``weight``: E4M3 (outputs, inputs); ``weight_scale``: (), a factor, which the layout of
            transformers names ``weight_scale_inv``.

        Raises:
            ConfigError: the input has no quantization, because calibration data never reached the
                layer.
        """
        if spec.input is None:
            raise ConfigError(
                f"it was not run on the data, and the layout {self.name!r} has no place"
                " for a layer whose input has no scale; give more data, or choose the"
                " layout 'quark'",
            )
        return {"weight": weight.matrix, self.weight_scale: weight.scale}

    def stored_scale(self, side: str, rounding: Rounding) -> dict[str, Any]:
        """Return the static scale of an input, or of the keys or values that a layer outputs.

        The scale of an input is ``input_scale``, or ``activation_scale`` for transformers. The
        scale of an output is ``output_scale``, which ``key`` renames.
        """
        # The scales of keys and values have no names of their own in this layout until ``key``.
        return {self.input_scale if side == "input" else "output_scale": rounding.scale}

    def restored(
        self,
        parts: Mapping[str, Any],
        spec: LayerSpec,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Quantized:
        """Return the weight from ``weight`` and its scale, under the name of either client.

        Raises:
            ModelError: the weight, or both ``weight_scale`` and ``weight_scale_inv``, are missing.
        """
        assert spec.weight is not None
        # vLLM and transformers have different names for the scale.
        scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
        weight = part_of(parts, "weight")
        return Quantized(
            spec.weight,
            shape,
            weight,
            needed(scale, "weight_scale").reshape(()),
            None,
            None,
            dtype,
        )

    def restored_scale(
        self,
        side: str,
        spec: TensorSpec,
        get: Callable[[str], Any],
    ) -> Params:
        """Return a static scale of shape (): ``input_scale`` or ``activation_scale`` for an input.

        The scale of keys or values is asked for as ``output_scale``, the name before ``key``.

        Raises:
            ModelError: the scale is missing.
        """
        if side != "input":
            return Params(needed(get("output_scale"), "output_scale").reshape(()))
        scale = get("input_scale")
        if scale is None:
            # The name in transformers.
            scale = get("activation_scale")
        return Params(needed(scale, "input_scale").reshape(()))

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> tuple[TorchConfig, Layout]:
        """Return the configuration of method "fp8", of vLLM or of transformers, and the layout.

        A "dynamic" ``activation_scheme`` stands for per-token scales. ``modules_to_not_convert``
        counts only if ``ignored_layers`` is missing or empty.

        Raises:
            ConfigError: ``activation_scheme`` is neither "static" nor "dynamic", weights have block
                scales (``weight_block_size``), or the list of float layers is malformed.
        """
        scheme, block = found.get("activation_scheme"), found.get("weight_block_size")
        if scheme not in ("static", "dynamic") or block is not None:
            raise ConfigError(
                f"quantization_config has activation_scheme {scheme!r} and"
                f" weight_block_size {block!r}; this reads 'static' and 'dynamic', and"
                " one scale for a weight",
            )
        # The lists of vLLM and of transformers.
        floats = names_in(found, "ignored_layers") or names_in(
            found,
            "modules_to_not_convert",
        )
        cache = KVCache(_E4M3) if found.get("kv_cache_scheme") == "static" else None
        spec = LayerSpec(_E4M3, _E4M3 if scheme == "static" else _TOKENS)
        return TorchConfig(spec, exclude=floats, kv_cache=cache), cls()


@dataclass(frozen=True)
class FinegrainedFp8Layout(Fp8Layout):
    """Layout of transformers: ``weight_scale_inv`` and ``activation_scale``."""

    name: ClassVar[str] = "finegrained-fp8"
    weight_scale: ClassVar[str] = "weight_scale_inv"
    input_scale: ClassVar[str] = "activation_scale"
    excluded: ClassVar[str] = "modules_to_not_convert"
    #: ``FP8Linear`` of transformers has no scales of keys and values.
    caches: ClassVar[bool] = False

    def quantization_config(
        self,
        quantized: Mapping[str, LayerSpec],
        floats: Sequence[str],
        config: TorchConfig,
    ) -> dict[str, Any]:
        """Return the configuration that quantizer_finegrained_fp8.py of transformers reads.

        ``weight_block_size`` is null, which stands for per-tensor scales.

        Raises:
            ConfigError: transformers would take a quantized layer for one of the float layers by
                its name, layers differ in ``activation_scheme``, or no layer is quantized.
        """
        # transformers matches the start of a name up to a dot, and its end.
        check_parts_of_names(self.name, quantized, floats, is_named_in_transformers)
        return super().quantization_config(quantized, floats, config)
