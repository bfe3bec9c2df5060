"""analyze: the accuracy loss of a quantized model by tensor, with causes."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

from onnx import ModelProto

from calibrators.base import is_number
from calibrators.onnx_runtime.isolation import isolated
from calibrators.onnx_runtime.session import model_bytes
from quark_onnx.analysis.causes import Evidence, causes_of, nsr
from quark_onnx.analysis.findings import Analysis, TensorError, Unmatched, WeightError
from quark_onnx.analysis.match import match
from quark_onnx.analysis.measure_tensors import Measured, counted, measure_tensors
from quark_onnx.analysis.output_steps import output_steps
from quark_onnx.analysis.reading import Reading
from quark_onnx.analysis.weights import bins, weight_errors, with_histogram
from quark_onnx.errors import ConfigError, ModelError, crash_errors, data_errors
from quark_onnx.graph import Graph, gather_constants, inlined
from quark_onnx.graph.io import load
from quark_onnx.report.measure import decibels
from quark_onnx.steps import reader_for, with_bodies

#: Number of worst tensors with histograms, also of their weights.
PICTURED = 12


def analyze(
    float_model: str | Path | ModelProto,
    quant_model: str | Path | ModelProto,
    data: Any,
    *,
    limit: int | None = None,
    isolate: bool = False,
) -> Analysis:
    """Find accuracy losses of a quantized model by tensor, with their causes.

    Args:
        float_model: the float model, a path or a ModelProto.
        quant_model: the quantized model, from this or any other tool, with the float model's inputs
            and outputs.
        data: samples, as for ``quantize_static``; twenty samples are usually enough.
        limit: maximum number of samples; None for all samples.
        isolate: run onnxruntime in another process, as for ``quantize``.

    Returns:
        Errors of tensors and weights, with causes.

    Raises:
        ConfigError: the limit is no whole number of at least 1.
        ModelError: a model cannot be loaded or run, the second is not quantized, or the models do
            not belong together.
        DataError: the data does not fit the float model.

    >>> from onnx import parser
    >>> from quark_onnx import quantize_static
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }''')
    >>> samples = [{"x": [[0.5, -1.0]]}, {"x": [[1.0, 0.3]]}]
    >>> found = analyze(model, quantize_static(model, samples), samples)
    >>> [tensor.name for tensor in found.tensors], [weight.name for weight in found.weights]
    (['x', 'y'], ['w'])
    """  # noqa: E501
    if limit is not None and not (is_number(limit, Integral) and limit > 0):
        raise ConfigError(
            f"limit is {limit!r}; it must be a whole number of at least 1",
        )
    with crash_errors(float_model, quant_model), isolated(isolate):
        return _analyzed(load(float_model), load(quant_model), data, limit)


def _analyzed(
    before: ModelProto,
    after: ModelProto,
    data: Any,
    limit: int | None,
) -> Analysis:
    reference, plain = _read(before)
    other, runnable = _read(after)
    if not other.quantizes():
        raise ModelError(
            "the quantized model has no QuantizeLinear, DequantizeLinear or other"
            " operator of a number format: it is not quantized; the float model comes"
            " first",
        )
    missing = {v.name for v in before.graph.output} - {
        v.name for v in after.graph.output
    }
    if missing:
        raise ModelError(
            f"the quantized model lacks the output {sorted(missing)[0]!r} of the float"
            " model",
        )
    matching = match(reference, other)
    samples = counted(_checked(reader_for(reference.graph, data)), limit)
    measured = measure_tensors((reference, plain), (other, runnable), matching, samples)
    weights, uncompared = weight_errors(reference, other, matching)
    tensors = _explained(
        reference,
        _Figures(reference, measured).errors(),
        measured,
        weights,
    )
    uncompared += [
        Unmatched(name, reason) for name, reason in matching.unmatched.items()
    ]
    uncompared += [
        Unmatched(name, watch.reason)
        for name, watch in measured.tensors.items()
        if watch.reason
    ]
    found = Analysis(
        samples=measured.samples,
        bytes_before=model_bytes(before),
        bytes_after=model_bytes(after),
        outputs=measured.outputs,
        tensors=tensors,
        weights=weights,
        unmatched=uncompared,
        steps=output_steps(
            reference.graph,
            {tensor.name: tensor.step for tensor in tensors},
        ),
    )
    return _pictured(found, reference, measured)


def _read(model: ModelProto) -> tuple[Reading, ModelProto]:
    """Return a model's reading, and a form of the model that onnxruntime can run.

    Vendor operators without a function body get a body.
    """
    graph = Graph.of(inlined(with_bodies(model)))
    gather_constants(graph)
    return Reading(graph), graph.to_model()


def _checked(samples: Any) -> Any:
    """Yield samples; errors of the reader become errors of this package."""
    with data_errors():
        yield from samples


class _Figures:
    """Figures of tensors, compared with the figures of inputs."""

    def __init__(self, reference: Reading, measured: Measured) -> None:
        self._reference = reference
        self._measured = {
            name: watch for name, watch in measured.tensors.items() if not watch.reason
        }
        self._sqnr: dict[str, float] = {}
        self._sources: dict[str, tuple[str, float]] = {}

    def errors(self) -> list[TensorError]:
        """Return the errors of compared tensors in the order of execution."""
        graph, found = self._reference.graph, list[TensorError]()
        for value in graph.inputs:
            found += self._error(
                value.name,
                "",
                "Input",
                ("", float("inf")),
                len(found),
            )
        for node in graph.nodes:
            source = self._worst([*node.inputs, *node.captures])
            for name in node.outputs:
                self._sources[name] = source
                found += self._error(name, node.name, node.op_type, source, len(found))
        return found

    def _worst(self, inputs: list[str]) -> tuple[str, float]:
        """Return the closest upstream tensor with the least SQNR, and the SQNR."""
        known = [
            (
                (name, self._sqnr[name])
                if name in self._sqnr
                else self._sources.get(name, ("", float("inf")))
            )
            for name in inputs
        ]
        return min(known, key=lambda entry: entry[1], default=("", float("inf")))

    def _error(
        self,
        name: str,
        node: str,
        op_type: str,
        source: tuple[str, float],
        place: int,
    ) -> list[TensorError]:
        watch = self._measured.get(name)
        if watch is None or not watch.statistic.count:
            return []
        s, grid, signal = (
            watch.statistic,
            watch.view.grid,
            watch.statistic.total("signal"),
        )
        rescaled = s.rescaled
        sqnr = self._sqnr[name] = s.fitted if rescaled else s.sqnr
        seen = grid is not None and not rescaled
        local = (
            None
            if s.operator is None or rescaled
            else decibels(signal, s.operator + (s.own or 0.0))
        )
        ends = (grid.lo, grid.hi, grid.step) if grid is not None else (None, None, None)
        lo, hi, step = (
            None if e is None else float(f(e))
            for e, f in zip(ends, (min_of, max_of, max_of), strict=True)
        )
        return [
            TensorError(
                name=name,
                counterpart=watch.view.value,
                matched_by=watch.pair.how,
                node=node,
                op_type=op_type,
                place=place,
                count=s.count,
                sqnr=sqnr,
                cosine=s.cosine,
                mean_error=s.total("error") / s.count,
                sqnr_before=(
                    decibels(signal, s.before)
                    if seen and s.before is not None
                    else None
                ),
                sqnr_grid=(
                    decibels(signal, s.own) if seen and s.own is not None else None
                ),
                sqnr_local=local,
                sqnr_inputs=source[1],
                added=(
                    nsr(local)
                    if local is not None
                    else max(0.0, nsr(sqnr) - nsr(source[1]))
                ),
                source=source[0],
                format=grid.format if grid is not None else "",
                lo=float(s.lo.min()),
                hi=float(s.hi.max()),
                grid_lo=lo,
                grid_hi=hi,
                step=step,
                clipped_low=s.low / s.count,
                clipped_high=s.high / s.count,
                clip_noise=s.clipped / s.own if s.own else 0.0,
                rescaled=rescaled,
            ),
        ]


def min_of(values: Any) -> float:
    """Return the minimum of an array as a float."""
    return float(values.min())


def max_of(values: Any) -> float:
    """Return the maximum of an array as a float."""
    return float(values.max())


def _explained(
    reference: Reading,
    errors: list[TensorError],
    measured: Measured,
    weights: list[WeightError],
) -> list[TensorError]:
    """Add causes to errors."""
    between = _Between(reference, {error.name for error in errors})
    grids = {
        error.name: nsr(error.sqnr_grid)
        for error in errors
        if error.sqnr_grid is not None
    }
    unknown = {
        error.name for error in errors if error.format and error.sqnr_grid is None
    }
    found = []
    for error in errors:
        watch = measured.tensors[error.name]
        nodes, reads = between.of(error.name)
        own = [weight for weight in weights if weight.node in nodes]
        brought = (
            None if reads & unknown else sum(grids.get(name, 0.0) for name in reads)
        )
        evidence = Evidence(error, watch.view.grid, watch.statistic, own, brought)
        found.append(replace(error, added=evidence.added, causes=causes_of(evidence)))
    return found


class _Between:
    """Nodes between a tensor and its closest compared upstream tensors."""

    def __init__(self, reference: Reading, compared: set[str]) -> None:
        self._graph, self._compared = reference.graph, compared

    def of(self, tensor: str) -> tuple[set[str], set[str]]:
        """Return the names of the nodes, and of their compared inputs."""
        nodes, reads, todo = set[str](), set[str](), [tensor]
        while todo:
            node = self._graph.producer(todo.pop())
            if node is None or node.name in nodes:
                continue
            nodes.add(node.name)
            reads.update(name for name in node.inputs if name in self._compared)
            todo += [
                name for name in node.inputs if name and name not in self._compared
            ]
        return nodes, reads


def _pictured(found: Analysis, reference: Reading, measured: Measured) -> Analysis:
    """Add histograms to the worst tensors and the related weights."""
    worst = {tensor.name for tensor in found.ranking[:PICTURED]}
    between = _Between(reference, {tensor.name for tensor in found.tensors})
    nodes = set[str]().union(*(between.of(name)[0] for name in worst))
    return replace(
        found,
        tensors=[
            (
                replace(t, histogram=bins(measured.tensors[t.name].statistic.histogram))
                if t.name in worst
                else t
            )
            for t in found.tensors
        ],
        weights=[
            (
                with_histogram(w, reference)
                if w.node in nodes and w.role == "weight"
                else w
            )
            for w in found.weights
        ],
    )
