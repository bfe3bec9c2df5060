"""The "fp8" layouts: per-tensor E4M3 weights, and static or per-token activations.

The names of scales in vLLM and in transformers differ. Each client has its own layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quark_onnx.errors import ConfigError
from quark_onnx.torch.checkpoints.entries import names_in
from quark_onnx.torch.checkpoints.layouts.base import (
    Layout,
    cache_key,
    check_linear,
    check_parts_of_names,
    needed,
    the_one,
)
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import KVCache, TorchConfig
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.quantized_layer import Rounding

if TYPE_CHECKING:
    import torch

_E4M3 = TensorSpec("fp8e4m3")
_TOKENS = _E4M3.with_(per_channel=True, dynamic=True)


def _is_whole(spec: TensorSpec) -> bool:
    """Return whether a specification is E4M3 with a per-tensor scale."""
    return spec.dtype == _E4M3.dtype and spec.per_tensor


@dataclass(frozen=True)
class Fp8Layout(Layout):
    """Layout of vLLM: ``weight_scale``, ``input_scale``, scales of keys and values.

    The names of scales are class attributes, which ``FinegrainedFp8Layout`` overrides.
    """

    name: ClassVar[str] = "fp8"
    method: ClassVar[str] = "fp8"
    parts: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_scale_inv")
    #: Names of the scales, and of the list of float layers.
    weight_scale: ClassVar[str] = "weight_scale"
    input_scale: ClassVar[str] = "input_scale"
    excluded: ClassVar[str] = "ignored_layers"

    def refusal(self, spec: LayerSpec) -> str:
        if spec.weight is None or spec.input is None or spec.output is not None:
            return "it has weights and inputs, both"
        if not _is_whole(spec.weight):
            return "it has fp8e4m3 with one scale for a weight"
        # vLLM computes the scale of a token at runtime.
        tokens = (
            spec.input.dtype == _E4M3.dtype
            and spec.input.per_channel
            and spec.input.dynamic
        )
        static = _is_whole(spec.input) and not spec.input.dynamic
        if tokens or static:
            return ""
        return (
            "it has fp8e4m3 with one scale for inputs, from data, or one for each token"
        )

    def cache_refusal(self, spec: TensorSpec) -> str:
        return "" if _is_whole(spec) else "it has fp8e4m3 for keys and values"

    def check_layer(
        self,
        name: str,
        kind: str,
        spec: LayerSpec,
        shape: tuple[int, ...],
    ) -> None:
        check_linear(self.name, name, kind, spec, shape)

    def quantization_config(
        self,
        quantized: Mapping[str, LayerSpec],
        floats: Sequence[str],
        config: TorchConfig,
    ) -> dict[str, Any]:
        kinds = {
            # A layer that was not run on the data has no input scale, and so no input here.
            name: "dynamic" if spec.input is None or spec.input.dynamic else "static"
            for name, spec in quantized.items()
        }
        return {
            "quant_method": "fp8",
            "activation_scheme": the_one(self.name, "an activation_scheme", kinds),
            "weight_block_size": None,
            self.excluded: list(floats),
            "kv_cache_scheme": None if config.kv_cache is None else "static",
        }

    def stored(self, weight: Quantized, spec: LayerSpec) -> dict[str, Any]:
        if spec.input is None:
            raise ConfigError(
                f"it was not run on the data, and the layout {self.name!r} has no place"
                " for a layer whose input has no scale; give more data, or choose the"
                " layout 'quark'",
            )
        return {"weight": weight.matrix, self.weight_scale: weight.scale}

    def stored_scale(self, side: str, rounding: Rounding) -> dict[str, Any]:
        # The scales of keys and values have no names of their own in this layout until ``key``.
        return {self.input_scale if side == "input" else "output_scale": rounding.scale}

    def restored(
        self,
        parts: Mapping[str, Any],
        spec: LayerSpec,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Quantized:
        assert spec.weight is not None
        # vLLM and transformers have different names for the scale.
        scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
        weight = needed(parts.get("weight"), "weight")
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
        ends = (
            ("input_scale", "activation_scale")
            if side == "input"
            else ("output_scale",)
        )
        # No ``or`` between both: the truth of a tensor is that of its value.
        found = next((scale for scale in map(get, ends) if scale is not None), None)
        return Params(needed(found, ends[0]).reshape(()))

    def key(self, name: str) -> str:
        return cache_key(name)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> tuple[TorchConfig, Layout]:
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

    def cache_refusal(self, spec: TensorSpec) -> str:
        return "keys and values stay float there"

    def quantization_config(
        self,
        quantized: Mapping[str, LayerSpec],
        floats: Sequence[str],
        config: TorchConfig,
    ) -> dict[str, Any]:
        # transformers looks for the names of float layers within other names.
        check_parts_of_names(self.name, quantized, floats)
        return super().quantization_config(quantized, floats, config)
