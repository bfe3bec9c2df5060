"""Rules of the compilers for a graph of any number format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from onnx import ModelProto, TensorProto

from quark_onnx.common.wording import counted
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import constant_behind
from quark_onnx.graph.shapes import is_static
from quark_onnx.targets.finding import Finding
from quark_onnx.targets.target import Target

_CONV = ("kernel_shape", "strides", "pads", "dilations", "group")
_POOL = ("kernel_shape", "strides", "pads")
_ASKED = {
    "Conv": ("G3", _CONV),
    "ConvTranspose": ("G3", _CONV),
    "MaxPool": ("G4", _POOL),
    "AveragePool": ("G4", _POOL),
}
#: Operators with weight and bias as their second and third input.
_WITH_PARAMETERS = ("Conv", "ConvTranspose", "Gemm")
_AUTOMATIC = ("SAME_UPPER", "SAME_LOWER", "VALID")
_FATAL = frozenset({"LSTM", "If"})
_REFUSED = frozenset({TensorProto.BFLOAT16})
#: Minimum number of convolutions for the compiler of the convolution engine.
_LEAST_CONVOLUTIONS = 2


def structure_findings(
    model: ModelProto, graph: Graph, target: Target
) -> Iterator[Finding]:
    """Yield broken rules for graphs: names, shapes, types, attributes, parameters.

    Operators that crash the compiler are included.

    Args:
        model: the model.
        graph: graph of the model.
        target: the target.
    """
    yield from _names(graph)
    yield from _shapes(graph)
    # Declared types of results; the provider refuses such a graph as a whole.
    halves = [
        node
        for node in graph.nodes
        if not _REFUSED.isdisjoint(map(graph.elem_type, node.outputs))
    ]
    if halves:
        yield Finding(
            "G10",
            halves[0].name,
            f"{counted(len(halves), 'node computes', 'nodes compute')} some, this one first",
        )
    if graph.opset > target.opset:
        yield Finding(
            "G11",
            "",
            f"it is {graph.opset}, and {target.opset} is advised for {target.name}",
        )
    yield from _attributes(graph)
    yield from _shared(graph)
    inputs = {value.name for value in model.graph.input}
    # Names of the file, in which IR version 3 lists every initializer as an input.
    for tensor in model.graph.initializer:
        if tensor.name in inputs:
            yield Finding("G7", "", f"{tensor.name!r} is both")
    for node in graph.nodes_of(_FATAL):
        yield Finding(
            "G8", node.name, f"{node.op_type} ends the process that compiles it"
        )


def convolution_findings(graph: Graph, target: Target) -> Iterator[Finding]:
    """Yield broken rules of the convolution engine.

    Args:
        graph: graph of a model in the format XINT8.
        target: the target.
    """
    # Only the compiler of X1 refuses models with fewer than two convolutions.
    if target.compiler == "X2":
        return
    count = len(graph.nodes_of({"Conv"}))
    if count < _LEAST_CONVOLUTIONS:
        yield Finding("G6", "", f"it has {count}; all of it would run on the CPU")


def _names(graph: Graph) -> Iterator[Finding]:
    """Yield tensors that no node computes, and tensors that two nodes compute."""
    # ONNX graphs are in SSA form: a name is defined once.
    known = {*graph.initializers, *(value.name for value in graph.inputs)}
    for node in graph.nodes:
        for name in node.results:
            if name in known:
                text = f"{name!r} is there before it is computed"
                yield Finding("G9", node.name, text)
            known.add(name)
    for node in graph.nodes:
        # Second pass: a reader before the producer is a matter of order, not of existence.
        for name in node.reads:
            if name not in known:
                text = f"nothing computes {name!r}, which it reads"
                yield Finding("G9", node.name, text)
    for output in graph.outputs:
        if output.name not in known:
            yield Finding("G9", "", f"nothing computes the output {output.name!r}")


def _shapes(graph: Graph) -> Iterator[Finding]:
    """Yield inputs with dynamic dimensions or with a batch other than 1."""
    for value in graph.fed:
        shape = graph.shape(value.name)
        if shape is None:
            yield Finding("G1", "", f"input {value.name!r} has the shape unknown")
        elif not is_static(shape):
            text = f"input {value.name!r} has the shape {list(shape)}"
            yield Finding("G1", "", text)
        # A vector has no batch.
        elif len(shape) > 1 and shape[0] != 1:
            yield Finding("G2", "", f"input {value.name!r} has a batch of {shape[0]}")


def _attributes(graph: Graph) -> Iterator[Finding]:
    """Yield convolutions and pools whose attributes are left to their defaults."""
    for node in graph.nodes:
        rule, names = _ASKED.get(node.kind, ("", ()))
        automatic = node.attribute("auto_pad", "NOTSET") in _AUTOMATIC
        missing = node.lacking(names)
        if automatic and rule == "G4":
            yield Finding(rule, node.name, f"auto_pad is {node.attribute('auto_pad')}")
        # A Conv with auto_pad must not have pads; its converter takes the automatic ones.
        elif missing and not (automatic and missing == ["pads"]):
            yield Finding(rule, node.name, f"{', '.join(missing)} missing")


def _shared(graph: Graph) -> Iterator[Finding]:
    """Yield the first further layer that reads a weight or bias of another layer."""
    readers: dict[str, list[Node]] = defaultdict(list)
    for node in graph.nodes_of(_WITH_PARAMETERS):
        for name in node.inputs[1:3]:
            # Shared codes count, also behind DQ nodes of their own.
            codes = constant_behind(graph, name)
            if codes:
                readers[codes].append(node)
    for name, nodes in readers.items():
        if len(nodes) > 1:
            text = f"it shares {name!r} with {nodes[0].name}"
            yield Finding("G5", nodes[1].name, text)
