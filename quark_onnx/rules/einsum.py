"""PlanBuilder the tensors of Einsum."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import is_control_tensor, rule


@rule("Einsum")
def einsum(node: Node, plan: PlanBuilder) -> None:
    """Quantize the operands, a constant one as a weight along an axis of the result.

    The result is quantized where the engine has no float32.
    """
    if is_control_tensor(node, plan, *node.inputs):
        return
    terms, result = _terms(node)
    for place, tensor in enumerate(node.inputs):
        term = terms[place] if place < len(terms) else ""
        others = "".join(terms[:place] + terms[place + 1 :])
        summed = [
            letter for letter in term if letter in others and letter not in result
        ]
        along = _axis(term, summed)
        constant = plan.graph.is_constant(tensor)
        if len(node.inputs) == 2 and constant and along is not None:
            own = [
                letter for letter in term if letter in result and letter not in others
            ]
            plan.weight(node, tensor, axis=_axis(term, own), along=along)
        else:
            plan.activation(node, tensor, along=along)
    products = len(node.inputs) == 2 and any(
        letter not in result for letter in "".join(terms)
    )
    if plan.rounds_results(node) or not products:
        plan.activation(node, node.outputs[0])


def _terms(node: Node) -> tuple[list[str], str]:
    """Return the indices of each operand and of the result.

    Without an arrow, the result has the indices that occur once.
    """
    equation = str(node.attribute("equation", "")).replace(" ", "")
    operands, arrow, result = equation.partition("->")
    if not arrow:
        letters = sorted(set(operands) - set(",."))
        result = "".join(letter for letter in letters if operands.count(letter) == 1)
    return operands.split(","), result


def _axis(term: str, letters: list[str]) -> int | None:
    """Return the axis of the last index.

    None after an ellipsis, which stands for any number of axes.
    """
    before = term.partition(".")[0]
    known = [letter for letter in letters if letter in before]
    if known:
        return before.index(known[-1])
    return None
