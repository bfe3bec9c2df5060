"""The contract of a rule, and the families of operators that several files speak of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quark_onnx.dtypes import Block
from quark_onnx.graph import Graph, Node
from quark_onnx.plan import Plan
from quark_onnx.registry import RULES

#: A rule reads the node and writes to the plan, nothing else.
Rule = Callable[[Node, Plan], None]

#: Operators that multiply by weights; what they read is worth being quantized, whatever it cost to
#: join it.
WEIGHTED = frozenset(
    {"Conv", "ConvTranspose", "DeformConv", "Gemm", "MatMul", "Einsum"}
    | {
        "com.microsoft::FusedConv",
        "com.microsoft::FusedGemm",
        "com.microsoft::FusedMatMul",
    },
)

#: Operators that normalize a residual stream, whose few outlier channels are many times larger than
#: the rest.
NORMALIZING = frozenset(
    {"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"}
    | {
        "com.microsoft::SkipLayerNormalization",
        "com.microsoft::SkipSimplifiedLayerNormalization",
    },
)
RESIDUAL = "the residual stream around a layer normalization is too wide for 8 bits"


def rule(*op_types: str, override: bool = False) -> Callable[[Rule], Rule]:
    """Decorator: register a rule for operator types.

    Args:
        op_types: types of the standard domain by their names, others as ``"domain::Type"``.
        override: replace the rules that these types have.

    Raises:
        ConfigError: an operator type has a rule.
    """
    return RULES.register(*op_types, override=override)


def kept_float(node: Node, plan: Plan, reason: str) -> bool:
    """Whether a node is left float for this reason: what runs it has float arithmetic, and safety
    was not waived.
    """
    asked = plan.specs[node].activation is not None and not all(
        map(plan.ineligible, node.inputs),
    )
    if plan.safe and asked and not plan.rounds_results(node):
        plan.keep_node(node, reason)
    return node.name in plan.kept


def is_control_tensor(node: Node, plan: Plan, *tensors: str) -> bool:
    """Whether a node is left float because a mask, a position or a size is among these tensors,
    which it reads.
    """
    for tensor in tensors:
        if plan.holds_mask_constants(tensor):
            plan.keep_node(
                node,
                f"{tensor!r} holds values that mean 'never'; no scale spans them and"
                " real values",
            )
        elif control(plan.graph, tensor):
            plan.keep_node(
                node,
                f"{tensor!r} is computed from integers alone: a mask or a position, not"
                " a signal",
            )
    return node.name in plan.kept


def spare_masked(node: Node, plan: Plan) -> None:
    """Keep float what an exponential reads, and what it is a sum of, where a mask may be part of
    it, in block formats.

    A value that means "never" takes the common exponent of its block with it, and leaves nothing of
    the others.
    """
    spec, tensor, way = plan.specs[node].activation, node.inputs[0], list[str]()
    if not plan.safe or spec is None or not isinstance(spec.dtype, Block):
        return
    producer = plan.graph.producer(tensor)
    while producer is not None and producer.kind in _CARRYING:
        way.append(tensor)
        tensor = producer.inputs[0]
        producer = plan.graph.producer(tensor)
    if producer is None or producer.kind not in _MASKING:
        return
    reason = (
        "a mask may be part of it, and would leave nothing of the other scores in its"
        f" blocks ({node.name})"
    )
    for name in (*way, tensor):
        plan.keep(name, reason)
    for operand in producer.inputs:
        plan.keep_for(producer, operand, reason)


#: What a mask comes in by, and what it passes on its way to an exponential.
_MASKING = frozenset({"Add", "Sub", "Sum", "Where", "Min", "Max"})
_CARRYING = frozenset(
    {"Mul", "Div", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Clip"},
)


def feeds_root_or_division(node: Node, plan: Plan) -> bool:
    """Whether its result ends in a root, a logarithm or a denominator, shifted and bounded by
    constants at most.

    There the smallest values matter most, and few codes tell them apart least.
    """
    todo, seen = [node], {node}
    while todo:
        result = todo.pop().outputs[0]
        for reader in plan.graph.consumers(result):
            if _roots(reader, plan, result):
                return True
            others = [name for name in reader.inputs if name and name != result]
            shifts = reader.kind in _SHIFTING and all(
                map(plan.graph.is_constant, others),
            )
            if shifts and reader not in seen:
                seen.add(reader)
                todo.append(reader)
    return False


def _roots(reader: Node, plan: Plan, tensor: str) -> bool:
    if reader.kind == "Pow":
        exponent = plan.graph.constant(reader.inputs[1])
        return (
            reader.inputs[0] == tensor
            and exponent is not None
            and bool(np.all(exponent < 1))
        )
    return reader.kind in _ROOTS or (
        reader.kind == "Div" and reader.inputs[1] == tensor
    )


_ROOTS = frozenset({"Sqrt", "Reciprocal", "Log"})
_SHIFTING = frozenset(
    {
        "Add",
        "Clip",
        "Max",
        "Min",
        "Mul",
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
    """Whether a float tensor is computed from integers and booleans alone: a mask, a position, a
    size.

    Such tensors steer; they do not carry the signal. Calibration data often shows only one of their
    values (a mask of all ones), so that their range cannot be measured.
    """
    producer = graph.producer(tensor)
    if producer is None or producer.kind not in _STEERING:
        return False
    todo, seen = [producer], {producer}
    found = False
    while todo:
        node = todo.pop()
        if node.kind not in _STEERING:
            return False
        for name in node.inputs:
            if not name or graph.is_constant(name):
                continue
            before = graph.producer(name)
            if graph.elem_type(name) not in _FLOATS:
                found = (
                    True  # an integer or a boolean: what lies behind it does not matter
                )
            elif before is None:
                return False  # a float input of the model
            elif before not in seen:
                seen.add(before)
                todo.append(before)
    return found


_FLOATS = frozenset(
    {0, 1, 10, 11, 16},
)  # undefined (taken for float), float, float16, double, bfloat16
_STEERING = frozenset(
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
    }
    | {
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
