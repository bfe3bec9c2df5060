"""Engines that run models: one file per engine, listed in the order of the tuple."""

from quark_onnx.common.registry import ENGINES
from quark_onnx.engines.base import Engine
from quark_onnx.engines.onnx_runtime import OnnxRuntime
from quark_onnx.engines.openvino import OpenVINO
from quark_onnx.engines.selected import (
    EngineRun,
    Selected,
    engine_title,
    on_engine,
    open_quantized,
    selected,
)

for _engine in (OnnxRuntime, OpenVINO):
    ENGINES.add(_engine.name, _engine)

__all__ = [
    "Engine",
    "EngineRun",
    "OnnxRuntime",
    "OpenVINO",
    "Selected",
    "engine_title",
    "on_engine",
    "open_quantized",
    "selected",
]
