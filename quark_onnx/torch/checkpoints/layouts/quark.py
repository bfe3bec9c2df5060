"""AMD Quark's own layout (release 0.13), for every number format.

Nibbles are in AutoAWQ's order or in sequence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from quark_onnx.config.checks import require_known, require_one_of
from quark_onnx.dtypes import Integer
from quark_onnx.torch.checkpoints import quark_json
from quark_onnx.torch.checkpoints.entries import object_in
from quark_onnx.torch.checkpoints.layouts.base import Layout, is_two_level, needed
from quark_onnx.torch.checkpoints.layouts.rounded_floats import (
    restored_floats,
    stored_floats,
)
from quark_onnx.torch.checkpoints.quark_tensors import (
    check_shape,
    has_place,
    restored,
    stored,
)
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats import affine
from quark_onnx.torch.formats.affine import Params, explicit_zero
from quark_onnx.torch.formats.bit_packing import ORDERS
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.quantized_layer import Rounding

#: Contents of weight tensors: codes, or dequantized floats.
WEIGHT_FORMATS = ("real_quantized", "fake_quantized")
#: The scale of probabilities, stored with a layer but named after its attention module.
_PROBABILITIES = re.compile(r"(?P<attention>.*)\.[^.]+\.(?P<end>prob_output_[a-z_]+)")


@dataclass(frozen=True)
class QuarkLayout(Layout):
    """AMD Quark's layout.

    Attributes:
        pack_method: order of nibbles, "reorder" or "order".
        weight_format: "real_quantized" for codes, or "fake_quantized" for dequantized floats with
            their scales. AMD Quark's import reads the latter; vLLM and transformers with amd-quark
            do not.
    """

    name: ClassVar[str] = "quark"
    method: ClassVar[str] = "quark"
    parts: ClassVar[tuple[str, ...]] = (
        "weight",
        "weight_scale",
        "weight_zero_point",
        "weight_scale_2",
        "weight_zero_point_2",
    )
    keeps_names: ClassVar[bool] = False
    whole_groups: ClassVar[bool] = False

    pack_method: str = "reorder"
    weight_format: str = WEIGHT_FORMATS[0]

    def __post_init__(self) -> None:
        require_known(self.weight_format, WEIGHT_FORMATS, "weight_format is")
        require_one_of("pack_method", self.pack_method, ORDERS)

    def refusal(self, spec: LayerSpec) -> str:
        """Return why AMD Quark has no serialized form of a weight; empty if it has one.

        Block floating point (MX6, MX9, BFP16) and MXINT8 have none. Inputs and outputs may have any
        format.
        """
        if spec.weight is None or has_place(spec.weight):
            return ""
        return "it has no codes for them"

    def cache_refusal(self, spec: TensorSpec) -> str:
        """Return an empty string: scales of keys and values of any format can be stored."""
        return ""

    def check_layer(
        self,
        name: str,
        kind: str,
        spec: LayerSpec,
        shape: tuple[int, ...],
    ) -> None:
        """Raise ConfigError if the codes of a layer do not fill whole bytes.

        Only formats that pack codes into bytes have such layers: 3-bit integers, uint2, and block
        formats with elements of 4 or 6 bits. Layers of every class are supported.
        """
        if spec.weight is not None:
            check_shape(name, spec.weight, shape)

    def quantization_config(
        self,
        quantized: Mapping[str, LayerSpec],
        floats: Sequence[str],
        config: TorchConfig,
    ) -> dict[str, Any]:
        """Return the configuration of AMD Quark 0.13, which vLLM's quark.py and amd-quark read.

        The entries of layers follow from ``config``; ``quantized`` is not used. ``exclude`` has the
        exact names of ``floats``, and ``export`` has ``pack_method`` and ``weight_format``.

        Raises:
            ConfigError: AMD Quark does not know the rule for the shared exponents of an input.
        """
        content = quark_json.to_json(config, floats, self.pack_method)
        # ``to_json`` writes the entry for codes.
        content["export"]["weight_format"] = self.weight_format
        return content

    def _second(self, spec: TensorSpec) -> str:
        """Return the suffix of an activation scale: a global scale has "_2"."""
        return "_2" if is_two_level(spec) and not self._is_fake else ""

    @property
    def _is_fake(self) -> bool:
        return self.weight_format != WEIGHT_FORMATS[0]

    def key(self, name: str) -> str:
        """Return the name of a tensor in files, for the name ``LAYER.END``.

        >>> QuarkLayout().key("model.layers.0.self_attn.q_proj.prob_output_scale")
        'model.layers.0.self_attn.prob_output_scale'
        """
        match = _PROBABILITIES.fullmatch(name)
        if not match:
            return name
        return f"{match['attention']}.{match['end']}"

    def stored(self, weight: Quantized, spec: LayerSpec) -> dict[str, Any]:
        """Return the tensors of a weight: packed codes, or dequantized floats for "fake_quantized".

        Names are ``weight``, ``weight_scale``, for integers ``weight_zero_point``, and
        ``weight_scale_2`` for a second level of scales; int4fp8 has ``weight_zero_point_2``. The
        modules ``checkpoints.quark_tensors`` and ``rounded_floats`` describe the shapes of each
        number format. For example, packed 4-bit integers with per-group scales are int32 (inputs,
        ceil(outputs / 8)).
        """
        if self._is_fake:
            return stored_floats(weight)
        return stored(weight, self.pack_method)

    def stored_scale(self, side: str, rounding: Rounding) -> dict[str, Any]:
        """Return the tensors of a static activation scale, as amd-quark names them.

        Returns:
            For NVFP4, the global scale as ``input_scale_2``, or ``input_scale`` in
            "fake_quantized" checkpoints. For integers, ``input_scale`` in float32 and
            ``input_zero_point`` in the dtype of codes, also if the zero point is 0. Otherwise
            ``input_scale``. ``side`` takes the place of "input" in the names.
        """
        assert rounding.scale is not None
        spec = rounding.spec
        if is_two_level(spec):
            return {f"{side}_scale{self._second(spec)}": rounding.scale}
        # FP8 has no zero point.
        if not isinstance(spec.dtype, Integer):
            return {f"{side}_scale": rounding.scale}
        zero = explicit_zero(rounding.zero, rounding.scale)
        # amd-quark has scales of integer activations in float32, with zero points even if all are
        # 0.
        return {
            f"{side}_scale": rounding.scale.float(),
            f"{side}_zero_point": zero.to(affine.code_type(spec)),
        }

    def restored(
        self,
        parts: Mapping[str, Any],
        spec: LayerSpec,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Quantized:
        """Return the weight from packed codes, or from the floats of "fake_quantized".

        Dequantized floats are rounded again with the stored scales, which restores the codes.

        Raises:
            ModelError: a tensor is missing, or a dequantized weight has another shape.
        """
        assert spec.weight is not None
        if self._is_fake:
            return restored_floats(parts, spec.weight, shape, dtype)
        return restored(parts, spec.weight, shape, dtype, self.pack_method)

    def restored_scale(
        self,
        side: str,
        spec: TensorSpec,
        get: Callable[[str], Any],
    ) -> Params:
        """Return an activation scale of shape (), and its zero point; None for a zero point of 0.

        Raises:
            ModelError: the scale is missing.
        """
        if not self._second(spec):
            return super().restored_scale(side, spec, get)
        end = f"{side}_scale_2"
        return Params(needed(get(end), end).reshape(()))

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> tuple[TorchConfig, Layout]:
        """Return the configuration of AMD Quark, and the layout with its two settings.

        Without an ``export`` entry, as in earlier releases, nibbles are in AutoAWQ's order
        ("reorder") and weights are codes ("real_quantized"). The result is a ``QuarkLayout`` also
        for checkpoints of ``OgaLayout``, whose ``quant_method`` is the same.

        Raises:
            ConfigError: an entry is not supported, or ``pack_method`` or ``weight_format`` is
                unknown.
        """
        config, method = quark_json.from_json(found)
        export = object_in(found, "export")
        # Configurations of earlier releases may lack the entry.
        weight_format = str(export.get("weight_format") or WEIGHT_FORMATS[0])
        return config, QuarkLayout(method, weight_format)
