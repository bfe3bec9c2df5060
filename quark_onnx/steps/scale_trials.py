"""Output errors against the float model for successive choices of scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, ValueInfoProto

from calibrators.onnx_runtime.interrupt import Lanes
from calibrators.onnx_runtime.session import open_session
from quark_onnx.containers import names_of
from quark_onnx.graph import Graph, Node, ShapeArithmetic
from quark_onnx.report.shapes import other_shape
from quark_onnx.steps.run import Reference, Sample

#: Noise below this share counts as zero, so that no single good sample outweighs the others.
_FLOOR = 1e-3
#: Operators that only move values.
_MOVING = frozenset({"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
#: Samples per batch, and the excess of mean noise after which no further batch is run.
_AT_ONCE, _SLACK = 2, 0.02
Scales = Mapping[str, NDArray[np.float32]]


class ScaleTrial:
    """The float outputs of a few samples, and a model with scales as inputs."""

    def __init__(
        self,
        graph: Graph,
        live: Graph,
        samples: Sequence[Sample],
        reference: Reference | None = None,
    ) -> None:
        """Compute the float outputs, and open the model.

        Args:
            graph: the float graph.
            live: the graph with scales as inputs.
            samples: samples to judge scales by.
            reference: a model with equal outputs, some of which are known already; None for none.
        """
        judged = _parts(graph)
        self._live, self._shapes, self._samples = (
            live,
            ShapeArithmetic.of(graph),
            samples,
        )
        # Names in the float graph; ``_judged`` has those in the live graph, the rounded tensors.
        self._names = [tensor for tensor, _ in judged]
        self._judged = [_as_read(live, tensor, reader) for tensor, reader in judged]
        # A session must not be asked for one output twice.
        self._results = list(dict.fromkeys(self._judged))
        self._session = _open(_with_outputs(live, self._results))
        self._read = names_of(self._session.get_inputs())
        self._references: list[list[tuple[int, NDArray[np.float64]]]] = []
        for values in _outputs(graph, self._names, samples, reference):
            self._references.append(
                [
                    # Outputs that are zero, infinite or no floats on a sample are not measured on
                    # it.
                    (place, v.astype(np.float64))
                    for place, v in enumerate(values)
                    if _measurable(v)
                ],
            )
        # Every sample needs an output, because the mean over none is NaN.
        self.usable = all(self._references)
        self._pool = Lanes(_AT_ONCE)

    def noise(self, scales: Scales, best: list[float]) -> list[float]:
        """Return the mean log noise-to-signal ratio over the outputs, per sample.

        The measurement stops early if the first samples are worse than ``best``, because the
        scales can no longer win.

        Args:
            scales: the scales.
            best: the least noise so far.

        Raises:
            ModelError: an output has another shape than in the float model.
        """
        found = list[float]()
        for start in range(0, len(self._references), _AT_ONCE):
            some = range(start, min(len(self._references), start + _AT_ONCE))
            found += self._pool.map(lambda place: self._one(scales, place), some)
            # The slack keeps chance on the first samples from ending a good trial.
            if best and np.mean(found) > np.mean(best[: len(found)]) + _SLACK:
                break
        return found

    def _one(self, scales: Scales, place: int) -> float:
        sample = self._samples[place]
        feeds = {
            # Scales are the inputs that no sample has.
            name: sample[name] if name in sample else scales[name]
            for name in self._read
        }
        values = dict(
            zip(self._results, self._session.run(self._results, feeds), strict=True),
        )
        errors = []
        for output, reference in self._references[place]:
            value = values[self._judged[output]]
            if value.shape != reference.shape:
                self._require_sized_by_data(
                    self._names[output],
                    reference.shape,
                    value.shape,
                )
            errors.append(_output_error(value, reference))
        return float(np.mean(errors))

    def _require_sized_by_data(
        self,
        tensor: str,
        reference: tuple[int, ...],
        found: tuple[int, ...],
    ) -> None:
        """Raise an error unless values of a signal decide the shape of a tensor."""
        if not self._shapes.sized_by_data(tensor):
            what = "output" if self._live.is_output(tensor) else "tensor"
            raise other_shape(f"{what} {tensor!r}", str(reference), str(found))

    def __enter__(self) -> ScaleTrial:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.__exit__(kind, error, trace)


def _outputs(
    graph: Graph,
    tensors: list[str],
    samples: Sequence[Sample],
    reference: Reference | None,
) -> Iterator[list[Any]]:
    """Yield the float values of tensors on every sample."""
    # Known outputs need no run; parts of a Concat inside the graph do.
    if reference is not None and all(map(graph.is_output, tensors)):
        for sample in samples:
            known = reference.outputs(sample)
            yield [known[tensor] for tensor in tensors]
        return
    session = open_session(_with_outputs(graph, tensors), what="the float model")
    for sample in samples:
        yield session.run(None, dict(sample))


def _open(model: ModelProto) -> Any:
    """Open a single-threaded session with rounded biases.

    One thread is enough, as several samples run in parallel.
    """
    return open_session(
        model,
        threads=1,
        what="the quantized model with its scales as inputs",
    )


def _output_error(value: NDArray[Any], reference: NDArray[np.float64]) -> float:
    """Return the log noise-to-signal ratio of an output on a sample.

    An output whose shape differs, because it depends on values, has lost its entire signal.
    """
    if value.shape != reference.shape:
        return float(np.log(1 + _FLOOR))
    # The reference is never zero, see ``_measurable``; float64, as the reference is.
    error = np.square(value - reference).sum() / np.square(reference).sum()
    if np.isfinite(error):
        return float(np.log(error + _FLOOR))
    # An overflow to infinity or NaN is worse than any error.
    return float("inf")


def _parts(graph: Graph) -> list[tuple[str, Node | None]]:
    """Return the concatenated parts of outputs, with a consumer per part.

    The consumer is None for an output. Parts are measured separately, because large coordinates
    of a detector would outweigh its scores.
    """
    found, todo = dict[str, Node | None](), list[tuple[str, Node | None]]()
    # Reversed, so that the first output is popped first.
    todo += [(value.name, None) for value in reversed(graph.outputs)]
    while todo:
        tensor, reader = todo.pop()
        joint = _joint(graph, tensor)
        if joint is None:
            if not graph.is_constant(tensor):
                # A tensor that several outputs join is measured once.
                found.setdefault(tensor, reader)
            continue
        todo += [(name, joint) for name in reversed(joint.inputs)]
    return list(found.items())


def _joint(graph: Graph, tensor: str) -> Node | None:
    """Return the Concat that a tensor is computed from, by operators that move values alone.

    None where no value is joined: errors of the tensor and of its source are equal.
    """
    node = graph.producer(tensor)
    while node is not None and node.kind in _MOVING:
        node = graph.producer(node.inputs[0])
    return node if node is not None and node.kind == "Concat" else None


def _as_read(live: Graph, tensor: str, reader: Node | None) -> str:
    """Return the rounded tensor for ``reader``; an output keeps its name."""
    if reader is None:
        return tensor
    node = next(node for node in live.nodes if node.name == reader.name)
    return node.inputs[reader.inputs.index(tensor)]


def _with_outputs(graph: Graph, tensors: list[str]) -> ModelProto:
    """Return the model with new outputs, of types inferred by onnxruntime."""
    model = graph.to_model()
    del model.graph.output[:]
    model.graph.output.extend(ValueInfoProto(name=name) for name in tensors)
    return model


def _measurable(value: Any) -> bool:
    floating = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return bool(floating and np.isfinite(value).all() and value.any())
