"""Output errors against the float model for successive choices of scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from calibrators.onnx_runtime.interrupt import AT_ONCE, Lanes
from calibrators.onnx_runtime.session import feeds_of, open_session
from calibrators.onnx_runtime.worker import Session
from quark_onnx.graph import Graph, Node, ShapeArithmetic
from quark_onnx.graph.shapes import untyped
from quark_onnx.plan import Plan, Use
from quark_onnx.report.shapes import other_shape
from quark_onnx.running.function_bodies import define_functions
from quark_onnx.running.run import Reference, Sample
from quark_onnx.scales.compute_qparams import Params, compute_bias_qparams
from quark_onnx.trials.quantized_session import make_fast
from quark_onnx.writing.insert import insert

#: Noise below this share counts as zero, so that no single good sample outweighs the others.
_FLOOR = 1e-3
#: Operators that only move values.
_MOVING = frozenset({"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
Scales = Mapping[Use, NDArray[np.float32]]


class _Quantized(NamedTuple):
    """A session on the quantized model.

    Attributes:
        session: the session.
        results: the outputs to compute.
        judged: the names of the judged tensors among the results, in order.
    """

    session: Session
    results: list[str]
    judged: list[str]

    def values(self, sample: Sample) -> list[Any]:
        """Return the judged tensors on a sample."""
        values = self.session.run(self.results, feeds_of(self.session, sample))
        by_name = dict(zip(self.results, values, strict=True))
        return [by_name[name] for name in self.judged]


class ScaleTrial:
    """Output errors of the quantized model for successive choices of scales.

    Attributes:
        usable: whether a sample has a float output that errors can be measured against; samples
            without one are left out.
    """

    def __init__(  # noqa: PLR0913
        self,
        graph: Graph,
        corrected: Graph,
        plan: Plan,
        params: Params,
        samples: Sequence[Sample],
        reference: Reference | None = None,
    ) -> None:
        """Compute the float outputs.

        Args:
            graph: the float graph.
            corrected: the graph to quantize: the float graph, or a copy with corrected biases.
            plan: the decisions about the tensors.
            params: the scales of all tensors except biases.
            samples: samples to judge scales by.
            reference: a model with equal outputs, some of which are known already; None for none.
        """
        self._corrected, self._plan, self._params = corrected, plan, params
        self._shapes = ShapeArithmetic.of(graph)
        self._judged = _parts(graph)
        self._names = [tensor for tensor, _ in self._judged]
        self._samples = list[Sample]()
        self._references = list[list[tuple[int, NDArray[np.float64]]]]()
        known = _outputs(graph, self._names, samples, reference)
        for sample, values in zip(samples, known, strict=True):
            measurable = [
                (output, value.astype(np.float64))
                for output, value in enumerate(values)
                if _measurable(value)
            ]
            if measurable:
                self._samples.append(sample)
                self._references.append(measurable)
        self.usable = bool(self._references)
        self._lanes = Lanes(AT_ONCE)

    def noise(self, scales: Scales) -> list[float]:
        """Return the mean log noise-to-signal ratio over the outputs, per sample that is measured.

        Args:
            scales: scales in place of those of ``params``, by use.

        Raises:
            ModelError: an output has another shape than in the float model.
        """
        model = self._opened(scales)
        return list(
            self._lanes.in_order(
                lambda index: self._one(model, index), range(len(self._references))
            )
        )

    def _opened(self, scales: Scales) -> _Quantized:
        """Quantize with other scales, and open the model.

        Scales are constants of the model, so that onnxruntime computes on integers.

        Args:
            scales: scales in place of those of ``params``, by use; empty for none.
        """
        params = self._params.with_scales(scales)
        plan = compute_bias_qparams(self._corrected, self._plan, params)
        quantized = insert(self._corrected, plan, params)
        define_functions(quantized)
        make_fast(quantized, params.encoded)
        judged = [_as_read(quantized, *pair) for pair in self._judged]
        results = list(dict.fromkeys(judged))
        lean = quantized.store is not None
        # One thread is enough, as several samples run in parallel.
        session = open_session(
            _with_outputs(quantized, results),
            threads=1,
            lean=lean,
            optimize=not lean,
            what="the quantized model with other scales",
        )
        return _Quantized(session, results, judged)

    def _one(self, model: _Quantized, index: int) -> float:
        """Return the mean log noise-to-signal ratio over the outputs on a sample."""
        values = model.values(self._samples[index])
        errors = []
        for output, reference in self._references[index]:
            value = values[output]
            if value.shape != reference.shape:
                self._require_sized_by_data(
                    self._names[output], reference.shape, value.shape
                )
            errors.append(_output_error(value, reference))
        return float(np.mean(errors))

    def _require_sized_by_data(
        self, tensor: str, reference: tuple[int, ...], quantized: tuple[int, ...]
    ) -> None:
        """Raise ModelError unless values of a signal decide the shape of a tensor."""
        if not self._shapes.sized_by_data(tensor):
            is_output = self._corrected.is_output(tensor)
            what = "output" if is_output else "tensor"
            raise other_shape(f"{what} {tensor!r}", str(reference), str(quantized))

    def __enter__(self) -> ScaleTrial:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lanes.__exit__(kind, error, trace)


def _outputs(
    graph: Graph,
    tensors: list[str],
    samples: Sequence[Sample],
    reference: Reference | None,
) -> Iterator[list[Any]]:
    """Yield the float values of tensors on every sample.

    Args:
        tensors: names of outputs, or of tensors inside the graph.
        reference: a model with equal outputs, asked instead of a run where all tensors are outputs;
            None for none.

    Yields:
        The values in the order of ``tensors``.
    """
    # Known outputs need no run; parts of a Concat inside the graph do.
    if reference is not None and all(map(graph.is_output, tensors)):
        for sample in samples:
            known = reference.outputs(sample)
            yield [known[tensor] for tensor in tensors]
        return
    session = open_session(_with_outputs(graph, tensors), what="the float model")
    for sample in samples:
        yield session.run(None, dict(sample))


def _output_error(value: NDArray[Any], reference: NDArray[np.float64]) -> float:
    """Return the natural log of noise over signal of an output, with a floor.

    Infinity for NaN or infinite values. An output of another shape, which depends on values,
    has lost its entire signal.
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
    parts, todo = dict[str, Node | None](), list[tuple[str, Node | None]]()
    # Reversed, so that the first output is popped first.
    todo += [(value.name, None) for value in reversed(graph.outputs)]
    while todo:
        tensor, reader = todo.pop()
        joint = _joint(graph, tensor)
        if joint is None:
            if not graph.is_constant(tensor):
                # A tensor that several outputs join is measured once.
                parts.setdefault(tensor, reader)
            continue
        todo += [(name, joint) for name in reversed(joint.inputs)]
    return list(parts.items())


def _joint(graph: Graph, tensor: str) -> Node | None:
    """Return the Concat that a tensor is computed from, by operators that move values alone.

    Returns:
        The Concat; None where no value is joined: errors of the tensor and of its source are equal.
    """
    node = graph.producer(tensor)
    while node is not None and node.kind in _MOVING:
        node = graph.producer(node.inputs[0])
    return node if node is not None and node.kind == "Concat" else None


def _as_read(quantized: Graph, tensor: str, reader: Node | None) -> str:
    """Return the rounded tensor for ``reader``; an output keeps its name.

    Args:
        reader: the Concat of the float graph that reads the tensor; None for an output.
    """
    if reader is None:
        return tensor
    node = next(node for node in quantized.nodes if node.name == reader.name)
    return node.inputs[reader.inputs.index(tensor)]


def _with_outputs(graph: Graph, tensors: list[str]) -> ModelProto:
    """Return the model with new outputs, of types inferred by onnxruntime."""
    model = graph.to_model()
    del model.graph.output[:]
    model.graph.output.extend(untyped(tensors))
    return model


def _measurable(value: Any) -> bool:
    """Return whether an output is a finite float array with a signal."""
    floating = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return bool(floating and np.isfinite(value).all() and value.any())
