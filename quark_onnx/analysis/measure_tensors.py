"""Measurement of the error of each pair of tensors, sample by sample.

Memory holds the activations of a single sample, as in ``calibrators.onnx_runtime.runner``. Both
models run with the tensors as outputs. The quantized model runs without onnxruntime's own fusions,
which would compute other values than the graph.

The quantized model runs a second time, with every matched tensor replaced by the float tensor. Each
operator and each grid then works on float values, which separates added noise from inherited noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from calibrators.onnx_runtime.session import open_session, outputs_of
from quark_onnx.analysis.match import FOLDED, Matching, TensorPair
from quark_onnx.analysis.reading import FLOATS, Reading, View
from quark_onnx.analysis.statistics import TensorStatistic
from quark_onnx.common.errors import DataError, ModelError
from quark_onnx.graph import Graph
from quark_onnx.graph.node import rename_entries
from quark_onnx.graph.shapes import untyped

#: Types of tensors that are compared. UNDEFINED: the type was not inferred, and may be float.
_MEASURED_TYPES = frozenset({*FLOATS, TensorProto.UNDEFINED})


@dataclass
class ObservedPair:
    """A pair of tensors under observation.

    Attributes:
        pair: the matched tensors.
        view: the quantized tensor.
        statistic: statistics so far.
        reason: reason why the pair is not compared; empty if it is compared.
    """

    pair: TensorPair
    view: View
    statistic: TensorStatistic
    reason: str = ""


@dataclass(frozen=True)
class Measured:
    """Measurements over all samples."""

    samples: int
    tensors: dict[str, ObservedPair]


class Side:
    """A model with a session, and with some tensors exposed as outputs."""

    def __init__(
        self,
        title: str,
        model: ModelProto,
        tensors: Iterable[str],
        *,
        optimize: bool = False,
    ) -> None:
        exposed = ModelProto()
        exposed.CopyFrom(model)
        # Inputs are not exposed: run() returns the fed values of those. An output must not be
        # declared twice.
        declared = {value.name for value in (*model.graph.input, *model.graph.output)}
        names = [name for name in dict.fromkeys(tensors) if name not in declared]
        exposed.graph.output.extend(untyped(names))
        self._title = title
        try:
            self._session = open_session(
                exposed,
                # Without fusions the quantized model is computed as its graph says. The float model
                # is optimized: exposed tensors are outputs, which optimizations keep.
                optimize=optimize,
                what=f"the {title} model with its tensors exposed",
            )
        except Exception as error:  # onnxruntime raises several unrelated types
            raise ModelError(
                f"onnxruntime cannot load the {title} model: {error}",
            ) from error

    def run(self, sample: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return exposed tensors, outputs and inputs on a sample, by name."""
        try:
            outputs = outputs_of(self._session, sample)
        except Exception as error:
            raise ModelError(
                f"sample {index}: onnxruntime cannot run the {self._title} model:"
                f" {error}",
            ) from error
        return {**sample, **outputs}


def measure_tensors(
    reference: tuple[Reading, ModelProto],
    other: tuple[Reading, ModelProto],
    matching: Matching,
    samples: Iterable[Mapping[str, Any]],
) -> Measured:
    """Measure the errors of matched tensors over the samples.

    Args:
        reference: the float model.
        other: the quantized model.
        matching: pairs of tensors.
        samples: inputs by name.

    Returns:
        Statistics of the tensors.

    Raises:
        DataError: there is no sample.
        ModelError: onnxruntime cannot load or run a model.
    """
    reading = other[0]
    watched = dict[str, ObservedPair]()
    for name, pair in matching.pairs.items():
        # Integer tensors (shapes, indices) are paired to lead the walk further, and have no noise.
        if reference[0].graph.elem_type(name) in _MEASURED_TYPES:
            watched[name] = _watch(reference[0], reading, pair)
    # Both sides of each grid: the value that consumers read, and the operator's result before the
    # grid.
    needed = list[str]()
    # Raw tensor of the quantized model -> name of the new input that replaces it for all of its
    # readers.
    fed = dict[str, str]()
    for watch in watched.values():
        needed += [watch.view.value, watch.view.raw]
        if _replaceable(watch, reading):
            fed[watch.view.raw] = f"{watch.view.raw}::float"
    # Three sessions stay open: the float model, the quantized model, and the quantized model on
    # float inputs (local).
    before = Side("float", reference[1], watched, optimize=True)
    after = Side("quantized", other[1], needed)
    local = Side("quantized", replaced(other[1], fed), needed)
    count = 0
    for index, sample in enumerate(samples):
        expected = before.run(sample, index)
        actual = after.run(sample, index)
        _observe_sample(watched, reading, expected, actual)
        feeds = _replacements(watched, fed, expected, actual)
        alone = local.run({**sample, **feeds}, index)
        _observe_sample_alone(watched, fed, expected, alone)
        count += 1
    if not count:
        raise DataError("no sample was given; at least one is needed")
    return Measured(count, watched)


def _observe_sample(
    watched: Mapping[str, ObservedPair],
    reading: Reading,
    expected: Mapping[str, Any],
    actual: Mapping[str, Any],
) -> None:
    """Observe the tensors on a sample; the first failure ends the comparison of a tensor."""
    for name, watch in watched.items():
        if not watch.reason:
            watch.reason = _observe(watch, reading, expected[name], actual)


def _replacements(
    watched: Mapping[str, ObservedPair],
    fed: Mapping[str, str],
    expected: Mapping[str, Any],
    actual: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the values of the new inputs of the quantized model on a sample.

    Args:
        fed: tensor of the quantized model -> new input that replaces the tensor.
        expected: tensors of the float model by name.
        actual: tensors of the quantized model by name.
    """
    feeds = dict[str, Any]()
    for watch in watched.values():
        if watch.view.raw in fed:
            feeds[fed[watch.view.raw]] = _fed(watch, expected, actual)
    return feeds


def _observe_sample_alone(
    watched: Mapping[str, ObservedPair],
    fed: Mapping[str, str],
    expected: Mapping[str, Any],
    alone: Mapping[str, Any],
) -> None:
    """Observe the tensors on a sample whose replaced tensors were float.

    Args:
        fed: tensor of the quantized model -> new input that replaced the tensor.
        expected: tensors of the float model by name.
        alone: tensors of the quantized model by name.
    """
    for name, watch in watched.items():
        if not watch.reason:
            # Without a replacement the second run computes with quantized inputs, and says nothing
            # about the operator alone.
            replaceable = watch.view.raw in fed
            _observe_alone(watch, expected[name], alone if replaceable else {})


def _watch(reference: Reading, other: Reading, pair: TensorPair) -> ObservedPair:
    """Return a pair of tensors with the statistic that samples fill."""
    view = other.view(pair.raw)
    axis = _channel_axis(reference.graph, pair.tensor)
    # Statistics per channel of the grid where there is one.
    if view.grid is not None and view.grid.granularity == "channel":
        axis = view.grid.axis
    return ObservedPair(pair, view, TensorStatistic(view.grid, axis))


def _channel_axis(graph: Graph, tensor: str) -> int | None:
    """Return the axis of a tensor's channels; None for a vector or an unknown shape.

    Channels are the last axis of a sequence of tokens (N, T, C), and the second axis otherwise.
    """
    rank = len(graph.sizes(tensor))
    if rank < 2:
        return None
    producer = graph.producer(tensor)
    convolved = producer is not None and "Conv" in producer.op_type
    return 2 if rank == 3 and not convolved else 1


def replaced(model: ModelProto, inputs: Mapping[str, str]) -> ModelProto:
    """Return a model whose nodes read new inputs instead of some tensors.

    Args:
        model: the model.
        inputs: tensor -> new input.
    """
    result = ModelProto()
    result.CopyFrom(model)
    for node in result.graph.node:
        rename_entries(node.input, inputs)
    result.graph.input.extend(
        # None leaves the shape, even the rank, open.
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        for name in inputs.values()
    )
    return result


def _replaceable(watch: ObservedPair, reading: Reading) -> bool:
    """Return True if a tensor is float and no subgraph captures it."""
    raw = watch.view.raw
    if reading.graph.elem_type(raw) != TensorProto.FLOAT:
        return False
    return watch.view.scale is None and not reading.graph.captured(raw)


def _fed(
    watch: ObservedPair,
    expected: Mapping[str, Any],
    actual: Mapping[str, Any],
) -> Any:
    """Return the replacement of a tensor: float values of the same shape and scale.

    Other tensors keep the quantized model's values.

    Args:
        watch: the pair under observation.
        expected: tensors of the float model by name.
        actual: tensors of the quantized model by name.
    """
    # A tensor must be fed in every run, since it is an input now; where the float values do not
    # fit, the tensor's own values change nothing.
    value = expected[watch.pair.tensor]
    quantized = actual[watch.view.raw]
    if getattr(value, "shape", None) != getattr(quantized, "shape", None):
        return quantized
    if value.dtype != np.float32 or watch.reason or watch.statistic.rescaled:
        return quantized
    return value


def _observe(
    watch: ObservedPair,
    reading: Reading,
    expected: Any,
    actual: Mapping[str, Any],
) -> str:
    """Observe a sample; return a reason if it cannot be compared.

    Args:
        watch: the pair under observation.
        reading: the quantized model.
        expected: value of the tensor in the float model; a sequence or a map has no comparison.
        actual: tensors of the quantized model by name.
    """
    seen = actual[watch.view.value]
    if not isinstance(expected, np.ndarray) or not isinstance(seen, np.ndarray):
        return "it is a sequence or a map"
    if expected.shape != seen.shape:
        return (
            f"its shape is {list(expected.shape)}, that of {watch.view.value!r}"
            f" {list(seen.shape)}"
        )
    if expected.dtype.kind != "f":
        return f"its values are {expected.dtype}"
    if watch.view.scale is not None:
        seen = reading.decoded(seen, watch.view.scale)
    elif seen.dtype.kind in "iu":
        return f"{watch.view.value!r} holds codes whose scale is not known"
    watch.statistic.observe(expected, seen, _computed(watch, expected, actual))
    return ""


def _observe_alone(
    watch: ObservedPair,
    expected: NDArray[Any],
    alone: Mapping[str, Any],
) -> None:
    """Observe a sample on which the tensor's inputs were float; ``alone`` may be empty."""
    rounded = alone.get(watch.view.value)
    watch.statistic.observe_alone(expected, _computed(watch, expected, alone), rounded)


def _computed(
    watch: ObservedPair,
    expected: NDArray[Any],
    actual: Mapping[str, Any],
) -> NDArray[Any] | None:
    """Return the tensor before its grid, unless a different operator computes it.

    Args:
        watch: the pair under observation.
        expected: value of the tensor in the float model.
        actual: tensors of the quantized model by name.
    """
    fused = watch.pair.fused
    if watch.view.scale is not None or fused not in ("", "Relu", "Clip", *FOLDED):
        return None
    computed = actual.get(watch.view.raw)
    if not isinstance(computed, np.ndarray) or computed.dtype.kind != "f":
        return None
    if fused == "Clip" and expected.size:
        # the range of the float values stands for the bounds
        # The bounds themselves are lost with the fused operator.
        return np.clip(computed, expected.min(), expected.max())
    return np.maximum(computed, 0) if fused == "Relu" else computed
