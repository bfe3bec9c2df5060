"""Define the contract of a rule, and predicates and operator families of several rules."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quark_onnx.common.registry import RULES
from quark_onnx.dtypes import Block
from quark_onnx.graph import Graph, Node, reach
from quark_onnx.patterns.norms import MEAN
from quark_onnx.plan import PlanBuilder

#: A rule reads the node and writes to the plan, nothing else.
Rule = Callable[[Node, PlanBuilder], None]

#: Operators that multiply by weights, whose inputs are worth being quantized in any case.
WEIGHTED = frozenset(
    {
        "Conv",
        "ConvTranspose",
        "DeformConv",
        "Gemm",
        "MatMul",
        "Einsum",
        "com.microsoft::FusedConv",
        "com.microsoft::FusedGemm",
        "com.microsoft::FusedMatMul",
    },
)

#: Operators that normalize a residual stream, which has a few outlier channels.
NORMALIZING = frozenset(
    {
        "LayerNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "com.microsoft::SkipLayerNormalization",
        "com.microsoft::SkipSimplifiedLayerNormalization",
    },
)
#: Why the operators of a decomposed normalization stay float, of which other rules take note.
NORMALIZES = "it is a part of a decomposed layer normalization"
RESIDUAL = "the residual stream around a layer normalization is too wide for 8 bits"


def rule(*op_types: str, override: bool = False) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule for operator types.

    Args:
        *op_types: types of the standard domain by name, others as ``"domain::Type"``.
        override: replace the rules of these types.

    Raises:
        ConfigError: an operator type has a rule.
    """
    return RULES.register(*op_types, override=override)


def normalizes(node: Node, plan: PlanBuilder) -> bool:
    """Return whether a node normalizes channels, or is a part of a decomposed normalization."""
    return node.kind in NORMALIZING or plan.kept.get(node.name) == NORMALIZES


def enters_normalization(node: Node, plan: PlanBuilder) -> bool:
    """Return whether a normalization reads a result, or parts of it, as in a transformer."""
    if node.name in plan.streams:
        return True
    return any(normalizes(follower, plan) for follower in plan.graph.followers(node))


def kept_float(node: Node, plan: PlanBuilder, reason: str) -> bool:
    """Keep a node float if the engine has float arithmetic; return the decision.

    Without ``plan.safe``, the node is not kept.

    Args:
        node: the node.
        plan: the plan.
        reason: why the node degrades with few bits.
    """
    if plan.safe and _is_asked(node, plan) and not plan.rounds_results(node):
        plan.keep_node(node, reason)
    return node.name in plan.kept


def _is_asked(node: Node, plan: PlanBuilder) -> bool:
    """Return whether a node has an input that could be quantized.

    Otherwise the node is float anyway, and needs no reason.
    """
    if plan.specs[node].activation is None:
        return False
    return any(not plan.ineligible(tensor) for tensor in node.inputs)


def follows_floats(node: Node, plan: PlanBuilder, *tensors: str) -> bool:
    """Keep a node float if its type follows its inputs, and one is float; return the decision.

    Constants count as float. The producers of the inputs have been planned before.

    Args:
        node: a Relu, Clip or Where.
        plan: the plan.
        *tensors: names of the inputs that carry the signal.
    """
    # Floats are handed on from node to node: rules run in the order of the graph.
    if node.kind in plan.asked.following and not all(
        plan.quantized(tensor, node) for tensor in tensors
    ):
        plan.keep_node(node, "its input is float, and its operator type follows it")
    return node.name in plan.kept


def is_control_tensor(node: Node, plan: PlanBuilder, *tensors: str) -> bool:
    """Keep readers of masks, positions and sizes float; return the decision.

    Args:
        node: the reader.
        plan: the plan.
        *tensors: names of the inputs that may be such tensors.
    """
    for tensor in tensors:
        if plan.holds_mask_constants(tensor):
            plan.keep_node(
                node,
                f"{tensor!r} holds values that mean 'never'; no scale spans them and"
                " real values",
            )
        # Checked second: a mask constant is recognized without a walk through the graph.
        elif control(plan.graph, tensor):
            plan.keep_node(
                node,
                f"{tensor!r} is computed from integers alone: a mask or a position, not"
                " a signal",
            )
    return node.name in plan.kept


def spare_masked(node: Node, plan: PlanBuilder) -> None:
    """Keep the input of an exponential float in block formats if a mask may be part of it.

    So are the operands of the sum that the input comes from. A value that means "never" sets the
    common exponent of its block, and the other values of the block round to 0.

    Args:
        node: an exponential, or a function that contains one, such as Softmax.
        plan: the plan, in which tensors are kept float.
    """
    if not plan.safe or not _reads_blocks(node, plan):
        return
    path = _carried(plan.graph, node.inputs[0])
    masking = plan.graph.producer_of_kind(path[-1], _MASKING)
    if masking is None:
        return
    reason = (
        "a mask may be part of it, and would leave nothing of the other scores in its"
        f" blocks ({node.name})"
    )
    for name in path:
        plan.keep(name, reason)
    for operand in masking.inputs:
        plan.keep_for(masking, operand, reason)


def _reads_blocks(node: Node, plan: PlanBuilder) -> bool:
    """Return whether the activations of a node are in a block format."""
    spec = plan.specs[node].activation
    return spec is not None and isinstance(spec.dtype, Block)


def _carried(graph: Graph, tensor: str) -> list[str]:
    """Return the tensors from which a tensor is scaled, clipped or moved, backward.

    The first one is the tensor itself, the last one may be the result of a masking operator.

    Args:
        tensor: name of the input of an exponential.
    """
    path = [tensor]
    carrying = graph.producer_of_kind(tensor, _CARRYING)
    while carrying is not None:
        path.append(carrying.inputs[0])
        carrying = graph.producer_of_kind(path[-1], _CARRYING)
    return path


#: Operators that apply a mask, and operators between the mask and an exponential.
_MASKING = frozenset({"Add", "Sub", "Sum", "Where", "Min", "Max"})
_CARRYING = frozenset(
    {"Mul", "Div", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Clip"},
)


def feeds_root_or_division(node: Node, plan: PlanBuilder) -> bool:
    """Return whether a result ends in a root, a logarithm or a denominator.

    Only factors, shifts and bounds by constants may lie between, and a difference. For such
    operators the smallest values matter most, which few codes represent worst.

    Args:
        node: the node, whose first result is followed.
        plan: the plan.
    """

    # For example, a variance reaches its root through the Add or Max of an epsilon.
    def shifting_readers(member: Node) -> list[Node]:
        tensor = member.outputs[0]
        readers = plan.graph.consumers(tensor)
        return [reader for reader in readers if _shifts(reader, plan, tensor)]

    def ends_in_root(member: Node) -> bool:
        tensor = member.outputs[0]
        readers = plan.graph.consumers(tensor)
        return any(_roots(reader, plan, tensor) for reader in readers)

    return any(ends_in_root(member) for member in reach([node], shifting_readers))


def kept_before_root(node: Node, plan: PlanBuilder) -> bool:
    """Keep a node float if its result ends in a root or a denominator; return the decision."""
    return feeds_root_or_division(node, plan) and kept_float(node, plan, DECIDING)


def kept_before_sum(node: Node, plan: PlanBuilder) -> bool:
    """Keep a square float if only sums that end in a root read it; return the decision.

    A variance is the mean of such squares, or the difference of one and a squared mean, of which
    few codes leave nothing.
    """
    factors = node.inputs
    readers = plan.graph.consumers(node.outputs[0])
    if factors[0] != factors[1] or not readers:
        return False
    for reader in readers:
        if reader.kind not in _SUMMING or not feeds_root_or_division(reader, plan):
            return False
    if not kept_float(node, plan, DECIDING):
        return False
    # The mean was taken of the values that are squared; a rounded one belongs to other values.
    mean = MEAN.match(plan.graph, factors[0], shared=True)
    if mean is not None:
        for reader, source in zip((node, *mean.nodes), mean.nodes, strict=False):
            plan.keep_for(reader, source.outputs[0], DECIDING)
    return True


def _shifts(reader: Node, plan: PlanBuilder, tensor: str) -> bool:
    """Return whether a node only scales, shifts or bounds a tensor, or subtracts from it."""
    if reader.kind == "Sub":
        return True
    if reader.kind not in _SHIFTING:
        return False
    others = [name for name in reader.inputs if name and name != tensor]
    return all(plan.graph.is_constant(name) for name in others)


def _roots(reader: Node, plan: PlanBuilder, tensor: str) -> bool:
    """Return whether a node takes a root, a logarithm or the reciprocal of a tensor."""
    if reader.kind == "Div":
        return reader.inputs[1] == tensor
    if reader.kind == "Pow":
        return reader.inputs[0] == tensor and _has_low_exponent(reader, plan.graph)
    return reader.kind in _ROOTS


def _has_low_exponent(power: Node, graph: Graph) -> bool:
    """Return whether the exponents of a Pow are constants below 1.

    Such exponents are roots and, if negative, denominators.
    """
    exponent = graph.constant(power.inputs[1])
    return exponent is not None and bool(np.all(exponent < 1))


_ROOTS = frozenset({"Sqrt", "Reciprocal", "Log"})
_SUMMING = frozenset({"Add", "Sub", "Sum", "ReduceSum", "ReduceMean"})
_SHIFTING = frozenset(
    {
        "Add",
        "Clip",
        "Relu",
        "Max",
        "Min",
        "Mul",
        "Div",
        "Expand",
        "Unsqueeze",
        "Squeeze",
        "Reshape",
        "Identity",
    },
)
DECIDING = (
    "it makes a root, a logarithm or a denominator, of which the smallest values matter"
    " most"
)


def control(graph: Graph, tensor: str) -> bool:
    """Return whether a float tensor is computed from integers and booleans alone.

    Such a mask, position or size controls the computation, and does not carry the signal.
    Calibration data often shows only one of its values (a mask of all ones), so that its range
    cannot be measured.

    Args:
        graph: the graph.
        tensor: name of the tensor.

    Returns:
        False, too, for an input of the model, and where another operator than those of ``_CONTROL``
            takes part.
    """
    producer = graph.producer(tensor)
    if producer is None or producer.kind not in _CONTROL:
        return False
    # Backward until every path ends in integers, booleans or constants.
    todo = [producer]
    seen = {producer}
    reads_integers = False
    while todo:
        node = todo.pop()
        if node.kind not in _CONTROL:
            return False
        for name in node.operands:
            if graph.is_constant(name):
                continue
            source = graph.producer(name)
            if graph.elem_type(name) not in _FLOATS:
                # The origin of an integer or a boolean does not matter.
                reads_integers = True
            elif source is None:
                return False  # a float input of the model
            elif source not in seen:
                seen.add(source)
                todo.append(source)
    return reads_integers


# undefined (taken for float), float, float16, double, bfloat16
_FLOATS = frozenset({0, 1, 10, 11, 16})
#: Operators that compute masks, positions and sizes.
_CONTROL = frozenset(
    {
        "Cast",
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Neg",
        "Where",
        "Expand",
        "Reshape",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "Slice",
        "Concat",
        "Identity",
        "Tile",
        "Range",
        "ConstantOfShape",
        "Min",
        "Max",
        "Clip",
        "Flatten",
    },
)
