"""Rules of the compilers for a graph of any number format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from onnx import ModelProto, TensorProto

from quark_onnx.common.wording import counted
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import constant_behind
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
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
_REFUSED = frozenset({TensorProto.BFLOAT16})
#: Minimum number of convolutions for the compiler of X1.
LEAST_CONVOLUTIONS = 2
#: Rank of an image: batch, channels, height and width.
_IMAGE = 4
#: Causes of dynamic shapes, in the order in which they are looked for.
OPEN_INPUT = "an input has a dynamic shape"
OPEN_BATCH = "the batch is dynamic"
FOLDABLE = "a shape is computed of constants"
BY_DATA = "data decides a shape"


def batch_of(graph: Graph, name: str) -> int:
    """Return the batch of an input; 1 if it has none, or a dynamic one, which becomes 1.

    The first axis of an image is the batch. That of another tensor is a batch if an output begins
    with the same size: a mask of 16 x 16 has no batch of 16.

    Args:
        graph: graph of the model.
        name: name of an input.
    """
    shape = graph.sizes(name)
    if name in graph.initializers or len(shape) < 2 or not isinstance(shape[0], int):
        return 1
    firsts = {graph.sizes(output.name)[:1] for output in graph.outputs}
    return shape[0] if len(shape) == _IMAGE or shape[:1] in firsts else 1


def open_inputs(graph: Graph) -> list[str]:
    """Return the inputs with a dynamic size other than the batch, or of unknown rank."""
    return [
        value.name
        for value in graph.fed
        if graph.shape(value.name) is None or not is_static(graph.sizes(value.name)[1:])
    ]


def why_dynamic(graph: Graph) -> str:
    """Return the cause of the dynamic shapes of a graph that has some."""
    if open_inputs(graph):
        return OPEN_INPUT
    if not all(graph.has_static_shape(value.name) for value in graph.fed):
        return OPEN_BATCH
    if any(_is_foldable(graph, node) for node in graph.nodes):
        return FOLDABLE
    return BY_DATA


def _is_foldable(graph: Graph, node: Node) -> bool:
    """Return whether legalization makes a constant of a node's result."""
    if node.op_type in QUANTIZE | DEQUANTIZE:
        return False
    if node.kind in ("Shape", "Size"):
        return graph.has_static_shape(node.inputs[0])
    operands = list(node.operands)
    return bool(operands) and all(map(graph.is_constant, operands))


def dynamic_tensor(graph: Graph, node: Node) -> str:
    """Return the first tensor that a node reads or computes in a dynamic shape; empty if none."""
    for name in (*node.operands, *node.results):
        if not graph.is_constant(name) and not graph.has_static_shape(name):
            return name
    return ""


def is_fatal(graph: Graph, node: Node) -> bool:
    """Return whether a node crashes the compiler.

    An LSTM does, and an If around which shapes are dynamic; one of static shapes is compiled
    (onnxsim/onnxsim#1404, #1432).
    """
    return node.kind == "LSTM" or (
        node.kind == "If" and bool(dynamic_tensor(graph, node))
    )


def is_padded_automatically(node: Node) -> bool:
    """Return whether a node leaves its padding to the runtime."""
    return node.attribute("auto_pad", "NOTSET") in _AUTOMATIC


def missing_attributes(node: Node) -> list[str]:
    """Return the attributes without which a converter fails at a convolution or a pool.

    A Conv with automatic padding must not have pads; its converter takes the automatic ones.
    """
    _, names = _ASKED.get(node.kind, ("", ()))
    missing = node.lacking(names)
    if is_padded_automatically(node) and missing == ["pads"]:
        return []
    return missing


def has_few_convolutions(graph: Graph, target: Target) -> bool:
    """Return whether the compiler of a target refuses a model for its few convolutions."""
    # Only the compiler of X1 does; the generic target stands for each of them.
    return (
        target.compiler != "X2" and len(graph.nodes_of({"Conv"})) < LEAST_CONVOLUTIONS
    )


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
    for node in graph.nodes:
        if is_fatal(graph, node):
            text = f"{node.op_type} ends the process that compiles it"
            yield Finding("G8", node.name, text)


def convolution_findings(graph: Graph, target: Target) -> Iterator[Finding]:
    """Yield broken rules of the convolution engine.

    Args:
        graph: graph of a model in the format XINT8.
        target: the target.
    """
    if has_few_convolutions(graph, target):
        count = len(graph.nodes_of({"Conv"}))
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
    """Yield dynamic dimensions of inputs and other tensors, and batches other than 1."""
    for value in graph.fed:
        shape = graph.shape(value.name)
        if not is_static(shape):
            text = "unknown" if shape is None else f"{list(shape)}"
            yield Finding("G1", "", f"input {value.name!r} has the shape {text}")
        elif (batch := batch_of(graph, value.name)) != 1:
            yield Finding("G2", "", f"input {value.name!r} has a batch of {batch}")
    if all(graph.has_static_shape(value.name) for value in graph.fed):
        yield from _inner_shapes(graph)


def _inner_shapes(graph: Graph) -> Iterator[Finding]:
    """Yield one finding for all dynamic shapes of a model whose inputs have static shapes."""
    # Sequences and maps have no element type, and no shape.
    names = [
        name
        for node in graph.nodes
        for name in node.results
        if graph.elem_type(name) and not graph.has_static_shape(name)
    ]
    if not names:
        return
    shape = graph.shape(names[0])
    text = "unknown" if shape is None else f"{list(shape)}"
    count = counted(len(names), "tensor has", "tensors have")
    cause = why_dynamic(graph)
    yield Finding(
        "G12" if cause == BY_DATA else "G1",
        "",
        f"{count} a dynamic shape, such as {names[0]!r} with {text}: {cause}",
    )


def _attributes(graph: Graph) -> Iterator[Finding]:
    """Yield convolutions and pools whose attributes are left to their defaults."""
    for node in graph.nodes:
        rule, _ = _ASKED.get(node.kind, ("", ()))
        missing = missing_attributes(node)
        if rule == "G4" and is_padded_automatically(node):
            yield Finding(rule, node.name, f"auto_pad is {node.attribute('auto_pad')}")
        elif missing:
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
