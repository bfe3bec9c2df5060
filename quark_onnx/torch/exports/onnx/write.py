"""Replacement of the placeholder nodes of quantized layers by ONNX operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from onnx import TensorProto

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.version import __version__
from quark_onnx.common.wording import counted
from quark_onnx.functions import DOMAIN as VENDOR
from quark_onnx.functions import definitions
from quark_onnx.fusions.base import CONTRIB
from quark_onnx.fusions.gather import gather_codes
from quark_onnx.graph import Graph, Node
from quark_onnx.torch.exports.onnx.activations import RoundingWriter
from quark_onnx.torch.exports.onnx.stand_in import DOMAIN, LINEAR, ROUNDING
from quark_onnx.torch.exports.onnx.weights import nbits_weight, write_weight
from quark_onnx.torch.models.quantized_layer import QuantizedLayer, Rounding
from quark_onnx.writing.provenance import write_producer

#: Forms of weights.
FORMS = ("auto", "operators", "qdq")


def write(
    graph: Graph,
    layers: Mapping[str, QuantizedLayer],
    between: Mapping[str, Rounding],
    form: str,
    kind: int,
) -> dict[str, str]:
    """Write every layer, and describe the operators of each layer.

    Args:
        graph: a graph with placeholder nodes; changed in place.
        layers: quantized layers by the names in the nodes.
        between: roundings between layers by the names in the nodes.
        form: see ``write_onnx``.
        kind: the ``TensorProto.DataType`` of the graph's floats, FLOAT or FLOAT16.

    Raises:
        ConfigError: a format cannot be written.
    """
    roundings, became = RoundingWriter(graph, kind), dict[str, list[str]]()
    weights = dict[str, tuple[str, str]]()
    # A list, since the loop removes nodes.
    for node in [node for node in graph.nodes if node.domain == DOMAIN]:
        name = str(node.attribute("layer"))
        if name in between:
            roundings.write(node, between[name], name, "value")
            continue
        layer = layers[name]
        if node.op_type == ROUNDING:
            side = str(node.attribute("side"))
            # The copy has a MarkedRounding in place of the rounding.
            text = roundings.write(node, getattr(layer, side).rounding, name, side)
            text = text and f"{side} {text}"
        else:
            text = _product(graph, node, name, layer, form, kind)
            if not text:
                text = _weight(graph, node, name, layer, form, kind, weights)
        # A layer that is called several times has several nodes.
        if text and text not in became.setdefault(name, []):
            became[name].append(text)
    # The functions describe AMD's operators to other runtimes.
    nodes = [node.to_proto() for node in graph.nodes if node.domain == VENDOR]
    graph.set_functions(
        [*definitions(nodes, graph.opset, {}), *roundings.functions.values()],
    )
    graph.drop_domain(DOMAIN)
    graph.drop_unused()
    write_producer(graph, _settings(layers))
    return {name: ", ".join(texts) for name, texts in became.items()}


def _settings(layers: Mapping[str, QuantizedLayer]) -> dict[str, str]:
    """Return the formats of quantized layers, the most frequent first, for the metadata."""
    weights, activations = Counter[str](), Counter[str]()
    for layer in layers.values():
        if layer.quantized is not None:
            weights[str(layer.quantized.spec)] += 1
            activations[str(layer.spec.input or "float")] += 1
    return {
        "version": __version__,
        "activation": _formats(activations),
        "weight": _formats(weights),
    }


def _formats(counts: Counter[str]) -> str:
    """Return a format, or several with the number of layers of each."""
    if len(counts) < 2:
        return next(iter(counts), "float")
    return "; ".join(f"{count} x {text}" for text, count in counts.most_common())


def _product(  # noqa: PLR0913
    graph: Graph,
    node: Node,
    name: str,
    layer: QuantizedLayer,
    form: str,
    kind: int,
) -> str:
    """Write a Linear layer as MatMulNBits, if supported.

    Returns:
        A description; empty if the layer is not written.
    """
    quantized = layer.quantized
    assert quantized is not None
    marked: Any = layer.input  # a MarkedRounding in the copy that is exported
    # their products are integers, too
    integers = marked is not None and marked.rounding.spec.measured
    if node.op_type != LINEAR or form == "qdq":
        return ""
    # Both operands are Q/DQ pairs then, which onnxruntime replaces by an integer product.
    if integers and not quantized.spec.group:
        return ""
    weight = nbits_weight(quantized)
    if weight is None:
        if form == "operators" and quantized.spec.group:
            raise ConfigError(
                f"layer {name!r}: onnxruntime has no operator for weights of"
                f" {quantized.spec}; write it with form='auto' or 'qdq'",
            )
        return ""
    # Zero points are optional.
    parts = dict(zip(("packed", "scales", "zero_points"), weight.inputs, strict=False))
    inputs = [node.inputs[0]]
    for part, array in parts.items():
        if part != "packed" and array.dtype.kind == "f" and kind == TensorProto.FLOAT16:
            array = array.astype("float16")
        inputs.append(graph.add_constant(f"{name}.weight_{part}", array))
    if len(node.inputs) > 1:
        # The bias is the sixth input; the inputs between are empty.
        inputs += [*[""] * (5 - len(inputs)), node.inputs[1]]
    graph.import_domain(CONTRIB)
    graph.remove([node])
    graph.add(
        "MatMulNBits",
        inputs,
        node.outputs,
        name=name,
        domain=CONTRIB,
        **weight.attributes,
    )
    return f"MatMulNBits of {weight.bits} bits in blocks of {weight.block_size}"


def _weight(  # noqa: PLR0913
    graph: Graph,
    node: Node,
    name: str,
    layer: QuantizedLayer,
    form: str,
    kind: int,
    written: dict[str, tuple[str, str]],
) -> str:
    """Write a layer with a separate weight and product; return a description."""
    assert layer.quantized is not None
    # A layer that is called several times has one weight.
    if name not in written:
        written[name] = write_weight(graph, name, layer, kind)
    weight, text = written[name]
    graph.remove([node])
    if node.op_type == LINEAR:
        _multiply(graph, node, name, weight)
        return text
    graph.replace_uses(node.outputs[0], weight)
    if form == "qdq":
        return text
    # An embedding gathers codes, and dequantizes the rows of its tokens alone.
    for reader in graph.consumers(weight):
        if reader.op_type == "Gather" and gather_codes(graph, reader):
            return (
                f"rows of {layer.quantized.spec.dtype.name}, picked before they"
                " are dequantized"
            )
    return text


def _multiply(graph: Graph, node: Node, name: str, weight: str) -> None:
    """Write the product of a Linear layer with a weight, and the addition of the bias."""
    x, *bias = node.inputs
    if not bias:
        graph.add("MatMul", [x, weight], node.outputs, name=name)
        return
    product = graph.fresh(f"{name}_product")
    graph.add("MatMul", [x, weight], [product], name=name)
    graph.add("Add", [product, *bias], node.outputs, name=f"{name}_bias")


def summary(became: Mapping[str, str]) -> list[str]:
    """Count the layers by description."""
    return [
        f"{counted(count, 'layer')}: {text}"
        for text, count in Counter(became.values()).most_common()
    ]


__all__ = ["FORMS", "summary", "write"]
