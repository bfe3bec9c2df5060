"""Plan the tensors of Einsum."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import is_control_tensor, rule

#: The axes of an operand that an equation does not name.
_ELLIPSIS = "..."


@rule("Einsum")
def einsum(node: Node, plan: PlanBuilder) -> None:
    """Quantize the operands, a constant matrix as a weight along an axis of the result.

    The result is quantized where the engine has no float32.
    """
    if is_control_tensor(node, plan, *node.inputs):
        return
    terms, result = _terms(node)
    is_product = len(node.inputs) == 2
    for place, tensor in enumerate(node.inputs):
        along, axis = _axes(terms, result, place)
        rank = len(plan.graph.sizes(tensor))
        # A constant vector has no axis of output channels, as in a MatMul.
        is_matrix = rank > 1 and plan.graph.is_constant(tensor)
        if is_product and along is not None and is_matrix:
            # Axes after an ellipsis are counted from the end; the rank of a constant is known.
            channel_axis = None if axis is None else axis % rank
            plan.weight(node, tensor, axis=channel_axis, along=along % rank)
        else:
            plan.activation(node, tensor, along=along)
    # Without a sum the result is an elementwise product, and rounded like that of a Mul.
    sums = not set(result).issuperset("".join(terms))
    if plan.rounds_results(node) or not (is_product and sums):
        plan.activation(node, node.outputs[0])


def _axes(terms: list[str], result: str, place: int) -> tuple[int | None, int | None]:
    """Return the axis of the sum and that of the output channels of an operand.

    Args:
        terms: indices of each operand.
        result: indices of the result.
        place: position of the operand among the inputs.

    Returns:
        Each axis, from the end (negative) after an ellipsis; None where there is none.
    """
    # An equation with fewer terms than inputs is not valid: nothing is known of the others.
    term = terms[place] if place < len(terms) else ""
    others = "".join(terms[:place] + terms[place + 1 :])
    # Indices that this operand shares with others, and that the result lacks, are summed over.
    summed = set(others) - set(result)
    # An index of the result that no other operand has runs over output channels.
    channels = set(result) - set(others)
    return _last_axis(term, summed), _last_axis(term, channels)


def _terms(node: Node) -> tuple[list[str], str]:
    """Return the indices of each operand and of the result.

    Without an arrow, the result has the axes of ellipses and the indices that occur once.
    """
    equation = str(node.attribute("equation", "")).replace(" ", "")
    operands, arrow, result = equation.partition("->")
    if not arrow:
        letters = sorted(set(operands) - set(",."))
        once = [letter for letter in letters if operands.count(letter) == 1]
        result = "".join(once)
        if _ELLIPSIS in operands:
            result = _ELLIPSIS + result
    return operands.split(","), result


def _last_axis(term: str, letters: set[str]) -> int | None:
    """Return the axis of the last index among some letters; None without any.

    The axis is counted from the end, as a negative number, after an ellipsis, which stands for any
    number of axes.

    Args:
        term: indices of an operand, which may have an ellipsis.
        letters: the indices to look for.
    """
    before, _, after = term.partition(_ELLIPSIS)
    for axis in range(-1, -len(after) - 1, -1):
        if after[axis] in letters:
            return axis
    for axis in range(len(before) - 1, -1, -1):
        if before[axis] in letters:
            return axis
    return None
