"""Non-finite input values without effect on measured tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from calibrators.readers.open import Allowed
from quark_onnx.dtypes import BFLOAT16
from quark_onnx.graph import Graph
from quark_onnx.graph.node import kinds_of
from quark_onnx.graph.traversal import reach
from quark_onnx.plan import Entry, Plan, Quantize
from quark_onnx.planning.nothing_to_quantize import FLOATS
from quark_onnx.rules import WEIGHTED

#: Operators that map minus infinity to zero.
_ABSORBING = frozenset(
    {
        "Softmax",
        "Exp",
        "Attention",
        "com.microsoft::Attention",
        "com.microsoft::MultiHeadAttention",
    }
    | {"com.microsoft::GroupQueryAttention"},
)


def allowed_nonfinite(graph: Graph, plan: Plan) -> dict[str, Allowed]:
    """Return the allowed non-finite values of every input.

    NaN or infinity in a sample is an error, because it spoils the range of every tensor
    computed from it, with two exceptions:

    - an input that no quantized tensor depends on may hold any value: the operand of IsNaN,
      missing features of a tree, and values of bfloat16 activations, which have neither a
      range nor, unlike our float16, saturation
    - an additive mask may hold minus infinity ("never"): a softmax follows before a layer
      multiplies the mask. Tensors on the way that calibration finds infinite stay float.

    Args:
        graph: the float graph.
        plan: the plan before calibration.

    Returns:
        "anything" or "-inf" by input name; inputs that must be finite are left out.
    """
    # Quantized in any use: a tensor with a reader of its own is spoiled all the same.
    finite = {use.tensor for use, entry in plan.entries.items() if _is_spoiled(entry)}
    result: dict[str, Allowed] = {}
    for value in graph.inputs:
        # The walk goes past a softmax here: after one, NaN remains NaN.
        if not finite & _depending(graph, value.name, ()):
            result[value.name] = "anything"
        elif _is_mask(graph, value.name):
            result[value.name] = "-inf"
    return result


def _is_spoiled(entry: Entry) -> bool:
    """Return whether NaN or infinity spoils a scale or block exponent, or saturates."""
    return isinstance(entry, Quantize) and entry.spec.dtype is not BFLOAT16


def _is_mask(graph: Graph, tensor: str) -> bool:
    # Tensors that may hold minus infinity: those up to the softmax.
    infinite = _depending(graph, tensor, _ABSORBING)
    readers = kinds_of(node for name in infinite for node in graph.consumers(name))
    # An infinite output could not be measured against the float model.
    has_outputs = any(map(graph.is_output, infinite))
    return bool(readers & _ABSORBING) and not readers & WEIGHTED and not has_outputs


def _depending(graph: Graph, tensor: str, stop: Collection[str]) -> set[str]:
    """Return a tensor and the float tensors computed from it.

    Args:
        stop: kinds of operators at which the search ends; empty to search to the outputs.
    """

    def after(name: str) -> Iterator[str]:
        for node in graph.consumers(name):
            if node.kind not in stop:
                # Other types, such as the shape or a comparison, are never infinite.
                yield from (
                    result
                    for result in node.results
                    if graph.elem_type(result) in FLOATS
                )

    return set(reach([tensor], after))
