"""Find the float tensors whose values are read as integers, positions or decisions alone.

A label that becomes an index, a score that is compared, or logits whose largest one is picked: a
rounding error gives another index there, and no small error. The readers decide, for any operator:
an operator that computes an integer, a boolean or a text decides by its values (Cast, Less, ArgMax,
NonZero, and TopK for its indices), and so does one that reads them as positions, such as
GridSample. A few operators decide and compute floats (Hardmax, trees). The way back from these
readers ends at the last layer with weights.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quark_onnx.graph.node import QUANTIZE
from quark_onnx.graph.operations import Operations, Tensor
from quark_onnx.graph.traversal import reach

#: Layers multiply by weights, or by other activations, in any domain: FusedConv, MatMulNBits.
_LAYER = re.compile("Conv|Gemm|MatMul|Einsum|Attention|LSTM|GRU|RNN|MoE")
#: Operators whose integer results are codes of a signal.
_CODING = QUANTIZE | {"DynamicQuantizeLinear"}
#: Operators that compare values, and may compute floats.
_COMPARING = frozenset(
    {
        "Hardmax",
        "Sign",
        "Unique",
        "com.microsoft::Unique",
        "ai.onnx.ml::Binarizer",
        "ai.onnx.ml::Imputer",
        "ai.onnx.ml::LabelEncoder",
        "ai.onnx.ml::OneHotEncoder",
        "ai.onnx.ml::TreeEnsemble",
        "ai.onnx.ml::TreeEnsembleClassifier",
        "ai.onnx.ml::TreeEnsembleRegressor",
    },
)
#: Operators that read the shape of a tensor, and no value.
SIZES = frozenset({"Shape", "Size", "SequenceLength"})
#: Operators that read the shape or the type of an input, and no value of it; index of the input.
_LIKE = {"CastLike": 1, "EyeLike": 0, "RandomNormalLike": 0, "RandomUniformLike": 0}


@dataclass(frozen=True)
class Decision:
    """The use of a tensor that only decisions read.

    Attributes:
        reader: operator type that decides.
        layered: the values are computed by a layer with weights, whose engine may round them.
    """

    reader: str
    layered: bool

    @property
    def reason(self) -> str:
        """The reason for float, for the report."""
        return (
            "it is read only as an integer, a position or a decision"
            f" ({self.reader}), which rounding would change"
        )


def is_layer(kind: str) -> bool:
    """Return whether an operator multiplies by weights, or by other activations."""
    return _LAYER.search(_op_type(kind)) is not None


def decisions(operations: Operations) -> dict[Tensor, Decision]:
    """Return the float tensors, constants included, that only decisions read.

    Args:
        operations: the operations of a graph with its bodies.
    """
    deciding = dict[Tensor, str]()
    signals = set(operations.outputs)
    layered = set[Tensor]()
    sources = defaultdict[Tensor, list[Tensor]](list)
    results = defaultdict[Tensor, list[Tensor]](list)
    for operation in operations.sequence:
        if operation.kind in SIZES:
            continue
        comparing = operation.kind in _COMPARING
        controls = operation.inputs if comparing else operation.controls
        for tensor in controls:
            deciding.setdefault(tensor, operation.kind)
        # None for the operators that read every input.
        end = _LIKE.get(operation.kind)
        values = [tensor for tensor in operation.inputs[:end] if tensor not in controls]
        if is_layer(operation.kind):
            signals.update(values)
            layered.update(operation.outputs)
        elif _op_type(operation.kind) in _CODING:
            signals.update(values)
        else:
            # An operator that computes an integer or a boolean of its values decides.
            if not operations.integers.isdisjoint(operation.outputs):
                deciding |= dict.fromkeys(values, operation.kind)
            for tensor in operation.outputs:
                sources[tensor] += values
            for tensor in values:
                results[tensor] += operation.outputs

    # Integers end each walk: they are exact in any case.
    def floats(tensors: Iterable[Tensor]) -> list[Tensor]:
        return [tensor for tensor in tensors if tensor not in operations.integers]

    read_as_signals = reach(floats(signals), lambda tensor: floats(sources[tensor]))
    behind_layers = reach(floats(layered), lambda tensor: floats(results[tensor]))
    return {
        tensor: Decision(kind, tensor in behind_layers)
        for tensor, kind in _labelled(deciding, sources).items()
        if tensor not in operations.integers and tensor not in read_as_signals
    }


def _labelled(
    deciding: Mapping[Tensor, str],
    sources: Mapping[Tensor, list[Tensor]],
) -> dict[Tensor, str]:
    """Return the operator type that decides, by tensor from which ``deciding`` is computed."""
    labels = dict[Tensor, str]()
    todo = list(deciding.items())
    while todo:
        tensor, kind = todo.pop()
        if tensor not in labels:
            labels[tensor] = kind
            # A tensor that is decided by itself keeps its own reader.
            todo += [(source, deciding.get(source, kind)) for source in sources[tensor]]
    return labels


def _op_type(kind: str) -> str:
    """Return an operator type without its domain."""
    return kind.rpartition("::")[2]
