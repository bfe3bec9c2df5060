"""Einsum: products and sums that an equation spells out."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import Plan
from quark_onnx.rules.base import is_control_tensor, rule


@rule("Einsum")
def einsum(node: Node, plan: Plan) -> None:
    """All operands, a constant one as a weight along an axis of the result.

    The result where there is no float32.
    """
    if is_control_tensor(node, plan, *node.inputs):
        return
    terms, result = _terms(node)
    for place, tensor in enumerate(node.inputs):
        term = terms[place] if place < len(terms) else ""
        others = "".join(terms[:place] + terms[place + 1 :])
        shared = _axis(
            term,
            [letter for letter in term if letter in others and letter not in result],
        )
        if (
            len(node.inputs) == 2
            and plan.graph.is_constant(tensor)
            and shared is not None
        ):
            own = _axis(
                term,
                [
                    letter
                    for letter in term
                    if letter in result and letter not in others
                ],
            )
            plan.weight(node, tensor, axis=own, along=shared)
        else:
            plan.activation(node, tensor, along=shared)
    products = len(node.inputs) == 2 and any(
        letter not in result for letter in "".join(terms)
    )
    if plan.rounds_results(node) or not products:
        plan.activation(node, node.outputs[0])


def _terms(node: Node) -> tuple[list[str], str]:
    """The indices of each operand and of the result, which are those that occur once where the
    equation has none.
    """
    left, arrow, right = (
        str(node.attribute("equation", "")).replace(" ", "").partition("->")
    )
    if not arrow:
        right = "".join(
            sorted(
                letter for letter in set(left) - set(",.") if left.count(letter) == 1
            ),
        )
    return left.split(","), right


def _axis(term: str, letters: list[str]) -> int | None:
    """The axis of the last of some indices.

    Unknown behind an ellipsis, which stands for any number of axes.
    """
    before = term.partition(".")[0]
    known = [letter for letter in letters if letter in before]
    return before.index(known[-1]) if known else None
