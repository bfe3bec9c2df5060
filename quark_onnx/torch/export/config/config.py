"""ExporterConfig: how a quantized model is written, in AMD Quark's spelling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quark_onnx.torch.quantization.config.fields import Fields


@dataclass
class JsonExporterConfig(Fields):
    """How a checkpoint of safetensors is written.

    Attributes:
        weight_merge_groups: None; each layer has a scale of its own.
        kv_cache_group: globs of layers that compute keys and values; those of the quantization if
            empty.
        min_kv_scale: the least scale of keys and values.
        weight_format: "real_quantized" for codes, "fake_quantized" for floats that have been
            rounded.
        pack_method: how nibbles are ordered, "reorder" or "order".
    """

    weight_merge_groups: list[list[str]] | None = None
    kv_cache_group: list[str] = field(default_factory=list)
    min_kv_scale: float = 0.0
    weight_format: str = "real_quantized"
    pack_method: str = "reorder"


@dataclass
class ExporterConfig(Fields):
    """How a model is written.

    Attributes:
        json_export_config: as a checkpoint.
        onnx_export_config: None; ONNX models are written in one way.
    """

    json_export_config: JsonExporterConfig = field(default_factory=JsonExporterConfig)
    onnx_export_config: Any = None
