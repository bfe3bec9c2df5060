"""The layout "quark" of onnxruntime-genai's model builder, for Ryzen AI.

The layout is AMD Quark's with fixed options: unsigned 4-bit integers with zero points, inputs
first, in blocks, nibbles in AutoAWQ's order. The model has the layers of a Llama, and a common
block size except for the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.checkpoints.layouts.base import (
    Layout,
    from_unsigned,
    group_sizes,
    in_columns,
    in_half,
    small_integers,
    the_one,
    unsigned,
)
from quark_onnx.torch.checkpoints.layouts.quark import QuarkLayout
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.runtime import model_builder

_HEAD = "lm_head"


@dataclass(frozen=True)
class OgaLayout(QuarkLayout):
    """AMD Quark's layout as read by onnxruntime-genai."""

    name: ClassVar[str] = "oga"
    whole_groups: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.pack_method != "reorder":
            raise ConfigError(
                f"pack_method is {self.pack_method!r}; onnxruntime-genai reads"
                " 'reorder' alone",
            )

    def refusal(self, spec: LayerSpec) -> str:
        """Return why a layer is not weight-only with 4-bit integers in blocks; empty if it is.

        Blocks have one of the sizes of the operator MatMulNBits: 16, 32, 64, 128 or 256 inputs.
        Per-channel scales are refused.
        """
        reason = small_integers(spec)
        if not reason and (
            spec.weight is None or spec.weight.group not in model_builder.BLOCKS
        ):
            return f"it has blocks of {', '.join(map(str, model_builder.BLOCKS))}"
        return reason

    def cache_refusal(self, spec: TensorSpec) -> str:
        """Return why keys and values cannot be stored; never empty, unlike for AMD Quark."""
        return Layout.cache_refusal(self, spec)

    def check_layer(
        self,
        name: str,
        kind: str,
        spec: LayerSpec,
        shape: tuple[int, ...],
    ) -> None:
        """Raise ConfigError unless the model builder has a quantized form of a layer.

        The layer must be a Linear with whole blocks, and have the name of a projection in a
        Llama's attention or MLP (also ``qkv_proj`` and ``gate_up_proj``), or ``lm_head``.
        """
        Layout.check_layer(self, name, kind, spec, shape)
        # The head is the only layer outside of decoder blocks that the builder quantizes.
        if name != _HEAD and not model_builder.LAYERS.fullmatch(name):
            raise ConfigError(
                f"{name} has no place in the layout 'oga': onnxruntime-genai's model"
                " builder knows the layers of a Llama (self_attn.q_proj, mlp.up_proj"
                " and so on, and lm_head); choose another layout",
            )

    def quantization_config(
        self,
        quantized: Mapping[str, LayerSpec],
        floats: Sequence[str],
        config: TorchConfig,
    ) -> dict[str, Any]:
        """Return AMD Quark's configuration, which onnxruntime-genai's quantized_model.py reads.

        ``global_quant_config`` is uint4 with zero points in blocks, whatever the integers of
        ``quantized``, since ``stored`` converts them. ``lm_head`` has an entry of
        ``layer_quant_config`` if its block size differs. ``config`` is not used.

        Raises:
            ConfigError: a layer other than ``lm_head`` stays float, layers of decoder blocks differ
                in block size, or none of them is quantized.
        """
        for name in floats:
            if name != _HEAD:
                raise ConfigError(
                    f"{name} stays float, and the model builder of onnxruntime-genai takes"
                    " every layer of a block for integers; quantize all but lm_head, or"
                    " choose another layout",
                )
        sizes = group_sizes(quantized)
        head = sizes.pop(_HEAD, None)
        # The builder has one block size for all decoder blocks, and one for the head.
        size = the_one(self.name, "blocks of", sizes)
        entries = () if head in (None, size) else ((_HEAD, _spec(head)),)
        return super().quantization_config(
            quantized,
            floats,
            TorchConfig(_spec(size), layers=entries),
        )

    def stored(self, weight: Quantized, spec: LayerSpec) -> dict[str, Any]:
        """Return a weight as unsigned 4-bit codes with zero points, inputs first.

        Returns:
            ``weight``: int32 (inputs, ceil(outputs / 8)), nibbles in AutoAWQ's order;
            ``weight_scale``: (blocks, outputs), of unchanged dtype; ``weight_zero_point``: int32
            (blocks, ceil(outputs / 8)), which holds 8 for symmetric codes.

        Raises:
            ConfigError: float16 cannot represent the scales.
        """
        in_half(weight.scale)  # the builder computes in float16
        # Signed codes move up by 8, as do their zero points.
        codes, zero = unsigned(weight)
        plain = _spec(weight.spec.group)
        assert plain.weight is not None
        scale = in_columns(weight.scale, weight)
        like = (weight.shape, weight.dtype)
        shifted = from_unsigned(codes, zero, scale, plain.weight, like)
        return super().stored(shifted, plain)


def _spec(size: int) -> LayerSpec:
    """Return unsigned 4-bit weights with zero points in blocks of a size."""
    return LayerSpec(TensorSpec("uint4", symmetric=False, block_size=size))
