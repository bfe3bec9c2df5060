"""Float arithmetic where the engine of a target is faster with it.

OpenVINO computes an activation function in the kernel of the layer before it, on the float sums.
A pair between them separates the two: YOLOX-nano takes 1.35 to 1.66 times as long. Attention on
floats is one kernel there; with asymmetric codes it is many.
"""

from __future__ import annotations

from quark_onnx.graph import Graph, Node, reach
from quark_onnx.graph.matching import counts_padding, only_use
from quark_onnx.patterns.activation import function_after
from quark_onnx.patterns.openvino_faults import POSITIVE, moved_to
from quark_onnx.patterns.weight_axes import transposed_matrix
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules import WEIGHTED
from quark_onnx.rules.passthrough import REARRANGING

_PRODUCTS = frozenset({"MatMul", "Einsum", "Gemm"})
#: Operators between the two products of an attention.
_BETWEEN = REARRANGING | {
    "Add",
    "Cast",
    "Clip",
    "Div",
    "Mul",
    "Relu",
    "Softmax",
    "Sub",
    "Tanh",
    "Where",
}

_FUSED = "the engine of the target computes it with the layer before it, in float"
_LAST = (
    "no layer reads it, and the engine of the target computes a float result as fast"
)
_ATTENTION = "the engine of the target computes products of two activations in float"
_PADDED = "the engine of the target pads codes of an average with 0, not with their zero point"


def spare_fused(plan: PlanBuilder) -> None:
    """Keep the activation functions after layers float, before rules are applied."""
    for node in plan.graph.nodes:
        if node.kind not in WEIGHTED or not node.results:
            continue
        functions = function_after(plan.graph, node.outputs[0])
        for member in functions:
            plan.keep_node(member, _FUSED)
            plan.keep(member.inputs[0], _FUSED)
        if functions:
            plan.keep(node.outputs[0], _FUSED)
        biased = _clipped_sum(plan.graph, node)
        if biased is not None:
            plan.keep(biased, _FUSED)


def _clipped_sum(graph: Graph, layer: Node) -> str | None:
    """Return the sum of a layer and a constant that a Relu or Clip alone reads; None otherwise."""
    addition = only_use(graph, layer.outputs[0], "Add")
    if addition is None or not any(map(graph.is_constant, addition.inputs)):
        return None
    result = addition.outputs[0]
    clips = [only_use(graph, result, kind) for kind in ("Relu", "Clip")]
    return result if any(clips) else None


def spare_products(plan: PlanBuilder) -> None:
    """Keep products of two activations float, and what lies between two of them."""
    graph = plan.graph

    def is_weight(tensor: str) -> bool:
        return graph.is_constant(tensor) or transposed_matrix(graph, tensor) is not None

    products = [
        node
        for node in graph.nodes
        if node.kind in _PRODUCTS and not any(map(is_weight, node.inputs[:2]))
    ]

    def after(node: Node) -> list[Node]:
        return [reader for reader in graph.followers(node) if reader.kind in _BETWEEN]

    def before(node: Node) -> list[Node]:
        return [leader for leader in graph.leaders(node) if leader.kind in _BETWEEN]

    forward = reach(products, after)
    backward = reach(products, before)
    for node in products + [node for node in forward if node in backward]:
        plan.keep_node(node, _ATTENTION)


def spare_padded_means(plan: PlanBuilder) -> None:
    """Keep inputs of averages that count their padding float, unless their zero point is 0.

    Preparation writes most of these averages as convolutions.
    """
    graph = plan.graph
    for node in graph.nodes_of({"AveragePool"}):
        if not counts_padding(node):
            continue
        for tensor in moved_to(graph, node.inputs[0]):
            if graph.producer_of_kind(tensor, POSITIVE) is None:
                plan.keep(tensor, _PADDED)


def spare_results(plan: PlanBuilder) -> None:
    """Keep the results of the last layers float, and all operators from which no layer reads.

    onnxruntime, in contrast, runs a convolution on integers only if its result is quantized.
    """
    graph = plan.graph
    # An RNN has weights in codes, which make the file smaller.
    layers = [node for node in graph.nodes if node.kind in WEIGHTED | {"RNN"}]
    leading = reach(layers, graph.leaders)
    for node in graph.nodes:
        if node not in leading:
            plan.keep_node(node, _LAST)
    for layer in layers:
        is_read = any(reader in leading for reader in graph.followers(layer))
        if layer.results and not is_read:
            plan.keep(layer.outputs[0], _LAST)
