"""opset: change the version of the standard operator set."""

from __future__ import annotations

from onnx import defs

from quark_onnx.common.errors import ConfigError
from quark_onnx.convert.base import ConversionSettings, conversion
from quark_onnx.graph import Graph
from quark_onnx.passes import at_opset


@conversion("opset", keeps="exactly", reads=["opset"])
def opset(graph: Graph, settings: ConversionSettings) -> tuple[Graph, list[str]]:
    """Change the version of the standard operator set to --opset, higher or lower."""
    if settings.opset is None:
        raise ConfigError(
            "the conversion opset needs the version to convert to (--opset 17)",
        )
    if not 1 <= settings.opset <= defs.onnx_opset_version():
        raise ConfigError(
            f"opset is {settings.opset}; the installed onnx knows 1 to {defs.onnx_opset_version()}",
        )
    if settings.opset == graph.opset:
        return graph, []
    return at_opset(graph, settings.opset), [
        f"opset {graph.opset} became {settings.opset}",
    ]
