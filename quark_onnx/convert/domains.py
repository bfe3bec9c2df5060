"""standard-qdq, microsoft-qdq and vendor-qdq: change the domain of Q/DQ nodes.

The operators of com.microsoft and com.amd.quark are versions of ONNX's for more types, or for
earlier opsets. com.vai.quantize is the former name of com.amd.quark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.common.errors import ModelError
from quark_onnx.common.registry import DTYPES
from quark_onnx.convert.base import (
    ConversionSettings,
    conversion,
    counted,
    everywhere,
    settled,
)
from quark_onnx.convert.pairs import parameters, write_zero_point
from quark_onnx.dtypes import BODY_OPSET, Float4, Integer, Scaled
from quark_onnx.functions import DOMAIN
from quark_onnx.fusions.base import CONTRIB
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.bodies import bodies
from quark_onnx.graph.codes import code_type
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.passes import at_opset

#: First opset of Q/DQ nodes with per-channel scales.
_PER_AXIS_OPSET = 13
_BLOCKS_OPSET = 21

#: Returns the least opset at which a node can change its domain; None if it cannot.
Need = Callable[[Graph, Node], "int | None"]


@conversion("standard-qdq", keeps="exactly")
def standard_qdq(graph: Graph, settings: ConversionSettings) -> tuple[Graph, list[str]]:
    """Convert Q/DQ nodes of com.microsoft, com.amd.quark and com.vai.quantize to those of ONNX.

    The opset is raised if need be.
    """
    return _converted(graph, "", _standard)


@conversion("microsoft-qdq", keeps="exactly")
def microsoft_qdq(
    graph: Graph, settings: ConversionSettings
) -> tuple[Graph, list[str]]:
    """Convert Q/DQ nodes to com.microsoft, with 4 to 16 bits at every opset."""
    return _converted(graph, CONTRIB, _microsoft)


@conversion("vendor-qdq", keeps="exactly")
def vendor_qdq(graph: Graph, settings: ConversionSettings) -> tuple[Graph, list[str]]:
    """Convert Q/DQ nodes to Extended(De)QuantizeLinear of com.amd.quark, with function bodies."""
    return _converted(graph, DOMAIN, _vendor)


def _row(graph: Graph, node: Node) -> Scaled | None:
    """Return the number format of a node's codes."""
    kind = code_type(graph, node)
    for name in DTYPES:
        row = DTYPES[name]
        # 4-bit floats are stored as uint4, and have operators of their own.
        if isinstance(row, Scaled) and not isinstance(row, Float4) and row.onnx == kind:
            return row
    return None


def _standard(graph: Graph, node: Node) -> int | None:
    """Return the least opset at which ONNX defines a Q/DQ node; None if no opset does.

    None, too, for computed parameters.
    """
    node_parameters = parameters(graph, node)
    row = _row(graph, node)
    if node_parameters is None or row is None or not _is_supported(row, node):
        return None
    # ONNX's DequantizeLinear of int32 has no zero point but 0.
    if row.onnx == TensorProto.INT32 and node_parameters.zero_point.any():
        return None
    opset = row.min_opset
    if node_parameters.scale.ndim:
        opset = max(opset, _PER_AXIS_OPSET)
    if node_parameters.block_size:
        opset = max(opset, _BLOCKS_OPSET)
    return opset


def _is_supported(row: Scaled, node: Node) -> bool:
    """Return whether ONNX defines a Q or DQ node for a number format."""
    return bool(row.emitted if node.op_type in QUANTIZE else row.read)


def _microsoft(graph: Graph, node: Node) -> int | None:
    """Return the least opset for a Q/DQ node in com.microsoft: 1; None if not defined there.

    None, too, for computed parameters.
    """
    row = _row(graph, node)
    if row is None or not _is_supported(row, node):
        return None
    # Every opset is late enough.
    return 1 if _has_integers(graph, node, bits=4) else None


def _vendor(graph: Graph, node: Node) -> int | None:
    """Return the least opset for a Q/DQ node in com.amd.quark; None if it cannot be there."""
    return BODY_OPSET if _has_integers(graph, node, bits=8) else None


def _has_integers(graph: Graph, node: Node, *, bits: int) -> bool:
    """Return whether codes are integers of at least ``bits``, with constant scales, no blocks."""
    row = _row(graph, node)
    if not isinstance(row, Integer) or row.bits < bits:
        return False
    node_parameters = parameters(graph, node)
    return node_parameters is not None and not node_parameters.block_size


def _converted(graph: Graph, domain: str, need: Need) -> tuple[Graph, list[str]]:
    """Change the domain of the Q/DQ nodes of a graph and its bodies; raise the opset if need be.

    Args:
        graph: the graph; it is changed in place unless the opset is raised.
        domain: the new domain; empty for that of ONNX.

    Returns:
        The converted graph, and notes on renamed and remaining nodes.
    """
    needs = list(_needs(graph, domain, need))
    opsets = [opset for opset in needs if opset is not None]
    notes = list[str]()
    if opsets and max(opsets) > graph.opset:
        # The nodes that can be renamed at the present opset are renamed even if it cannot be
        # raised.
        try:
            raised = at_opset(graph, max(opsets))
            notes = [f"opset {graph.opset} became {raised.opset}"]
            graph = raised
        except ModelError as error:
            notes = [str(error)]
    count = everywhere(graph, lambda inner: _rename_all(inner, domain, need))
    renamed = counted(count, "node", "renamed")
    notes = [*renamed, *notes] if count else renamed
    remaining = len(needs) - count
    if remaining:
        notes.append(
            f"{remaining} Q/DQ nodes stay as they are: {domain or 'ONNX'} has no such"
            " type, or a scale is computed",
        )
    return settled(graph, count), notes


def _needs(graph: Graph, domain: str, need: Need) -> Iterator[int | None]:
    """Yield the needs of each Q/DQ node of another domain, also in bodies."""
    for node in _of_other_domains(graph, domain):
        yield need(graph, node)
    for body in bodies(graph):
        yield from _needs(Graph(body.model), domain, need)


def _of_other_domains(graph: Graph, domain: str) -> list[Node]:
    """Return the Q/DQ nodes of other domains."""
    nodes = graph.nodes_of_type(QUANTIZE | DEQUANTIZE)
    return [node for node in nodes if node.domain != domain]


def _rename_all(graph: Graph, domain: str, need: Need) -> int:
    """Change the domain of the Q/DQ nodes of a graph that can have it at the graph's opset.

    Bodies are left unchanged. Return the number of renamed nodes.
    """
    count = 0
    for node in _of_other_domains(graph, domain):
        opset = need(graph, node)
        if opset is not None and opset <= graph.opset:
            _rename(graph, node, domain)
            count += 1
    return count


def _rename(graph: Graph, node: Node, domain: str) -> None:
    """Change the domain of a Q/DQ node, and the attributes and inputs that depend on the domain.

    Args:
        domain: the new domain; empty for that of ONNX.
    """
    plain = "QuantizeLinear" if node.op_type in QUANTIZE else "DequantizeLinear"
    prefix = "Extended" * (domain == DOMAIN)
    node.rename(prefix + plain, domain)
    if domain:
        graph.import_domain(domain)
        # The operators of these domains have neither attribute; a zero point tells the type.
        node.drop_attribute("output_dtype")
        node.drop_attribute("saturate")
        write_zero_point(graph, node)
    for index, name in enumerate(node.inputs[1:3], 1):
        array = graph.constant(name)
        # ONNX distinguishes a vector of one element from a scalar.
        if array is not None and array.shape == (1,):
            graph.set_input(node, index, _scalar(graph, name, array))


def _scalar(graph: Graph, name: str, array: NDArray[Any]) -> str:
    """Return the scalar of a constant of one element, which is added once."""
    return graph.shared_constant(
        ("scalar", name), f"{name}_scalar", lambda: array.reshape(())
    )
