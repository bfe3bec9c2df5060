"""quark-names and vitis-names: rename AMD's operators to com.amd.quark or com.vai.quantize.

Older converters know the earlier names only (zmaychek84/vaip, to_xir_ops_pass.cpp, 2025-03).
"""

from __future__ import annotations

from quark_onnx.convert.base import ConversionSettings, conversion, counted, everywhere
from quark_onnx.functions import DOMAIN
from quark_onnx.graph import Graph
from quark_onnx.running.function_bodies import OLD_DOMAIN, RENAMED


@conversion("quark-names", keeps="exactly")
def quark_names(graph: Graph, settings: ConversionSettings) -> tuple[Graph, list[str]]:
    """Rename operators of com.vai.quantize to their present names in com.amd.quark.

    With function bodies.
    """
    names = {(OLD_DOMAIN, old): (DOMAIN, new) for old, new in RENAMED.items()}
    return _renamed(graph, names)


@conversion("vitis-names", keeps="exactly")
def vitis_names(graph: Graph, settings: ConversionSettings) -> tuple[Graph, list[str]]:
    """Rename operators of com.amd.quark to their earlier names in com.vai.quantize.

    Without function bodies.
    """
    names = {(DOMAIN, new): (OLD_DOMAIN, old) for old, new in RENAMED.items()}
    return _renamed(graph, names)


def _renamed(
    graph: Graph, names: dict[tuple[str, str], tuple[str, str]]
) -> tuple[Graph, list[str]]:
    """Rename operators in a graph and its bodies, in place; return a note on their number.

    Args:
        names: new domain and operator type, by present domain and operator type.
    """

    def rename(inner: Graph) -> int:
        nodes = [node for node in inner.nodes if (node.domain, node.op_type) in names]
        for node in nodes:
            domain, name = names[node.domain, node.op_type]
            node.rename(name, domain)
            # ``everywhere`` passes bodies as graphs of their own; the model needs the import,
            # too.
            graph.import_domain(domain)
            inner.import_domain(domain)
        return len(nodes)

    return graph, counted(everywhere(graph, rename), "node", "renamed")
