"""ExporterConfig: export settings with AMD Quark's API names."""

from __future__ import annotations

from dataclasses import dataclass, field

from quark_onnx.torch.quantization.config.fields import Fields


@dataclass
class JsonExporterConfig(Fields):
    """Settings of a safetensors checkpoint.

    Attributes:
        weight_merge_groups: None; scales are not merged over layers.
        kv_cache_group: globs of layers that compute keys and values; if empty, those of the
            quantization.
        min_kv_scale: the least scale of keys and values.
        weight_format: "real_quantized" for codes, "fake_quantized" for dequantized floats.
        pack_method: the order of nibbles, "reorder" or "order".
    """

    weight_merge_groups: list[list[str]] | None = None
    kv_cache_group: list[str] = field(default_factory=list)
    min_kv_scale: float = 0.0
    weight_format: str = "real_quantized"
    pack_method: str = "reorder"


@dataclass
class OnnxExporterConfig(Fields):
    """Settings of an ONNX export: empty, as in AMD Quark."""


@dataclass
class ExporterConfig(Fields):
    """Export settings of a model.

    Attributes:
        json_export_config: settings of a checkpoint.
        onnx_export_config: without effect, as it has no settings.
    """

    json_export_config: JsonExporterConfig = field(default_factory=JsonExporterConfig)
    onnx_export_config: OnnxExporterConfig | None = None
