"""analyze: the accuracy loss of a quantized model by tensor, with causes."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from operator import itemgetter
from pathlib import Path

from onnx import ModelProto

from calibrators.onnx_runtime.isolation import isolated
from calibrators.onnx_runtime.tensors import model_bytes
from calibrators.readers.open import CalibrationData
from calibrators.readers.spool import Spool
from quark_onnx.analysis.advise import SAMPLES, TrialSettings, advise_file, fixes
from quark_onnx.analysis.causes import TensorEvidence, causes_of, nsr
from quark_onnx.analysis.findings import TensorError, Unmatched, WeightError
from quark_onnx.analysis.match import match
from quark_onnx.analysis.measure_tensors import Measured, measure_tensors
from quark_onnx.analysis.output_steps import output_steps
from quark_onnx.analysis.reading import CodeGrid, Reading, quantizes
from quark_onnx.analysis.result import TOP, Analysis
from quark_onnx.analysis.statistics import TensorStatistic
from quark_onnx.analysis.weights import bins, weight_errors, with_histogram
from quark_onnx.check.inlined import inlined
from quark_onnx.common.errors import ModelError, crash_errors, data_errors
from quark_onnx.common.progress import Progress, Show, showing
from quark_onnx.files.io import load
from quark_onnx.graph import Graph, gather_constants, reach
from quark_onnx.measuring.open_data import reader_for
from quark_onnx.report.measure import decibels
from quark_onnx.running.function_bodies import with_bodies
from quark_onnx.search.checks import check_budget, check_limit
from quark_onnx.trials.judge import judge_models

#: The source of a tensor without noise before it: no name, and an infinite SQNR.
_EXACT = ("", float("inf"))
_NO_GRID = CodeGrid("")


def analyze(  # noqa: PLR0913
    float_model: str | Path | ModelProto,
    quant_model: str | Path | ModelProto,
    data: CalibrationData | None,
    *,
    limit: int | None = None,
    task: str = "auto",
    budget: float | None = None,
    progress: Show = False,
    isolate: bool = False,
) -> Analysis:
    """Find accuracy losses of a quantized model by tensor, with their causes.

    The errors of the outputs and the verdict are those of ``compare``. Every tensor is observed,
    so that onnxruntime fuses no integer kernels: fused kernels round differently, and an output
    as a tensor can have another SQNR.

    Args:
        float_model: the float model, a path or a ModelProto.
        quant_model: the quantized model, from this or any other tool, with the float model's inputs
            and outputs.
        data: samples, as for ``quantize_static``; twenty samples are usually enough.
        limit: maximum number of samples; None for all samples.
        task: task of the models, as for ``quantize``.
        budget: time limit in seconds for trying changes of the quantization after a risky or poor
            verdict; None to list them untried. Models of other tools have no configuration to
            change, and nothing is tried.
        progress: as for ``quantize_static``.
        isolate: run onnxruntime in another process, as for ``quantize``.

    Returns:
        Errors of tensors and weights, with causes.

    Raises:
        ConfigError: the limit is no whole number of at least 1, or the budget no positive number.
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
    check_limit(limit)
    check_budget(budget)
    crashes = crash_errors(float_model, quant_model)
    with crashes, isolated(isolate), showing(progress) as show:
        before, after = load(float_model), load(quant_model)
        read = _read(before), _read(after)
        _require_pair(*(model for _, model in read))
        with Spool() as spool, Progress(show, 3, "analyzing", "part") as bar:
            # Several passes read the samples: by tensor, by output, and for each trial.
            reader = reader_for(Graph.of(inlined(before)), data)
            with data_errors():
                for sample in islice(reader, limit):
                    spool.append(sample)
            bar.update(1)
            sizes = model_bytes(before), model_bytes(after)
            found = _analyzed(*read, sizes, spool)
            bar.update(2)
            judged = judge_models(before, after, spool, task=task, random=reader.random)
            bar.update(3)
            found = replace(
                found,
                outputs=judged.outputs,
                verdict=judged.verdict,
                warnings=list(map(str, judged.findings)),
            )
            if found.verdict is None:
                return found
            # Wrong inputs come first: no setting makes up for them.
            steps = tuple(finding.next_step for finding in judged.findings[:1])
            if not steps and found.verdict.band in ("risky", "poor"):
                trial_settings = None
                if budget is not None:
                    trial_settings = TrialSettings(task, budget, progress=show)
                steps = advise_file(
                    before,
                    after,
                    spool,
                    found.verdict,
                    trial_settings,
                    fixes(found),
                    limit=SAMPLES if limit is None else None,
                )
    return replace(found, verdict=replace(found.verdict, next_steps=steps))


def _require_pair(before: ModelProto, after: ModelProto) -> None:
    """Raise ModelError if the second model is not quantized, or lacks an output of the first."""
    if not quantizes(after):
        raise ModelError(
            "the quantized model has no QuantizeLinear, DequantizeLinear or other"
            " operator of a number format: it is not quantized; the float model comes"
            " first",
        )
    # Additional outputs of the quantized model are allowed: some tools expose intermediate tensors.
    missing = _outputs(before) - _outputs(after)
    if missing:
        raise ModelError(
            f"the quantized model lacks the output {sorted(missing)[0]!r} of the float"
            " model",
        )


def _analyzed(
    before: tuple[Reading, ModelProto],
    after: tuple[Reading, ModelProto],
    sizes: tuple[int, int],
    samples: Spool,
) -> Analysis:
    """Compare two models tensor by tensor.

    Args:
        before: the float model, as ``_read`` returns it.
        after: the quantized model.
        sizes: bytes of both models as given.
        samples: inputs by name.

    Returns:
        The analysis without outputs and verdict, with histograms of the worst tensors.

    Raises:
        ModelError: a model cannot be run.
    """
    reference, other = before[0], after[0]
    matching = match(reference, other)
    measured = measure_tensors(before, after, matching, samples)
    weights, uncompared = weight_errors(reference, other, matching)
    tensors = _explained(
        reference,
        _Figures(reference, measured).errors(),
        measured,
        weights,
    )
    for name, reason in matching.unmatched.items():
        uncompared.append(Unmatched(name, reason))
    # Tensors that were matched, and could not be compared on some sample.
    for name, watch in measured.tensors.items():
        if watch.reason:
            uncompared.append(Unmatched(name, watch.reason))
    analysis = Analysis(
        samples=measured.samples,
        bytes_before=sizes[0],
        bytes_after=sizes[1],
        outputs=[],
        tensors=tensors,
        weights=weights,
        unmatched=uncompared,
        steps=output_steps(
            reference.graph,
            {tensor.name: tensor.step for tensor in tensors},
        ),
    )
    return _pictured(analysis, reference, measured)


def _outputs(model: ModelProto) -> set[str]:
    return {value.name for value in model.graph.output}


def _read(model: ModelProto) -> tuple[Reading, ModelProto]:
    """Return a model's reading, and a form of the model that onnxruntime can run.

    Vendor operators without a function body get a body.
    """
    graph = Graph.of(inlined(with_bodies(model)))
    # Constant nodes become initializers, so that a weight is found under one name whatever the
    # exporter.
    gather_constants(graph)
    return Reading(graph), graph.to_model()


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
        graph = self._reference.graph
        errors = list[TensorError]()
        # Inputs of the model come first, without noise from upstream.
        for value in graph.inputs:
            errors += self._error(value.name, "", "Input", _EXACT, len(errors))
        for node in graph.nodes:
            # Tensors that a body of If, Loop or Scan reads count as inputs of its node. Nodes are
            # in topological order, so that the figures of all inputs are known.
            source = self._worst([*node.inputs, *node.captures])
            for name in node.outputs:
                # Before the tensor's own figure: a tensor without a comparison hands its source on.
                self._sources[name] = source
                errors += self._error(
                    name,
                    node.name,
                    node.op_type,
                    source,
                    len(errors),
                )
        return errors

    def _worst(self, inputs: list[str]) -> tuple[str, float]:
        """Return the closest upstream tensor with the least SQNR in dB; ``_EXACT`` without one."""
        sources = map(self._closest, inputs)
        return min(sources, key=itemgetter(1), default=_EXACT)

    def _closest(self, tensor: str) -> tuple[str, float]:
        """Return a tensor with its SQNR in dB, or the source of a tensor without one."""
        if tensor in self._sqnr:
            return tensor, self._sqnr[tensor]
        return self._sources.get(tensor, _EXACT)

    def _error(
        self,
        name: str,
        node: str,
        op_type: str,
        source: tuple[str, float],
        place: int,
    ) -> list[TensorError]:
        """Return the error of a tensor; nothing for a tensor that no sample has reached.

        Args:
            name: name of the tensor in the float model.
            node: name of the node that computes it.
            op_type: operator type of that node.
            source: name of the noisiest input, and the SQNR of all inputs in dB.
            place: place of the node in the graph.
        """
        watch = self._measured.get(name)
        if watch is None or not watch.statistic.count:
            return []
        statistic = watch.statistic
        grid = watch.view.grid or _NO_GRID
        rescaled = statistic.rescaled
        # The fit removes the channel factors of equalization, which are no error.
        sqnr = statistic.fitted if rescaled else statistic.sqnr
        self._sqnr[name] = sqnr
        before, of_grid, local = _ratios_of_parts(
            statistic,
            has_grid=watch.view.grid is not None,
        )
        least, greatest, step = grid.extremes()
        # Without a run on float inputs, the excess over the worst input estimates what the
        # operator adds.
        added = max(0.0, nsr(sqnr) - nsr(source[1]))
        if local is not None:
            added = nsr(local)
        return [
            TensorError(
                name=name,
                counterpart=watch.view.value,
                matched_by=watch.pair.how,
                node=node,
                op_type=op_type,
                place=place,
                count=statistic.count,
                sqnr=sqnr,
                cosine=statistic.cosine,
                mean_error=statistic.total("error") / statistic.count,
                sqnr_before=before,
                sqnr_grid=of_grid,
                sqnr_local=local,
                sqnr_inputs=source[1],
                added=added,
                source=source[0],
                format=grid.format,
                lo=float(statistic.lo.min()),
                hi=float(statistic.hi.max()),
                grid_lo=least,
                grid_hi=greatest,
                step=step,
                clipped_low=statistic.low / statistic.count,
                clipped_high=statistic.high / statistic.count,
                # own is None for a grid that was not observed, and 0.0 for an exact one.
                clip_noise=statistic.clipped / statistic.own if statistic.own else 0.0,
                rescaled=rescaled,
            ),
        ]


def _ratios_of_parts(
    statistic: TensorStatistic,
    *,
    has_grid: bool,
) -> tuple[float | None, float | None, float | None]:
    """Return the ratios before the grid, of the grid alone, and with float inputs.

    Nothing is known of a rescaled tensor, whose float values have other scales.

    Args:
        statistic: sums over all samples.
        has_grid: whether the tensor is rounded.

    Returns:
        Three SQNRs in dB, each None if it was not observed: before the grid, of the grid alone on
        float values, and of operator and grid with float inputs.
    """
    if statistic.rescaled:
        return None, None, None
    signal = statistic.total("signal")
    before = of_grid = local = None
    if has_grid and statistic.before is not None:
        before = decibels(signal, statistic.before)
    if has_grid and statistic.own is not None:
        of_grid = decibels(signal, statistic.own)
    if statistic.operator is not None:
        # The errors of operator and grid are independent, so that their energies add up.
        local = decibels(signal, statistic.operator + (statistic.own or 0.0))
    return before, of_grid, local


def _explained(
    reference: Reading,
    errors: list[TensorError],
    measured: Measured,
    weights: list[WeightError],
) -> list[TensorError]:
    """Add causes to errors.

    Args:
        errors: errors of the tensors in the order of execution, without causes.
        measured: the measurements behind the errors.
        weights: errors of the constants.
    """
    between = _Between(reference, {error.name for error in errors})
    grids = dict[str, float | None]()  # noise of each grid; None if it is not known
    # None marks a format whose noise was not measured; tensors that stay float are absent, and add
    # nothing.
    for error in errors:
        if error.sqnr_grid is not None:
            grids[error.name] = nsr(error.sqnr_grid)
        elif error.format:
            grids[error.name] = None
    explained = []
    for error in errors:
        watch = measured.tensors[error.name]
        nodes, reads = between.of(error.name)
        # Weights of all nodes up to the next compared tensors: an intermediate result that the
        # quantized model lacks has its weights counted here.
        own = [weight for weight in weights if weight.node in nodes]
        noise = _total_noise(grids, reads)
        evidence = TensorEvidence(error, watch.view.grid, watch.statistic, own, noise)
        explained.append(
            # The evidence subtracts the noise of the input grids, which _error could not yet know.
            replace(error, added=evidence.added, causes=causes_of(evidence)),
        )
    return explained


def _total_noise(grids: dict[str, float | None], tensors: set[str]) -> float | None:
    """Return the sum of the noise of tensors' grids; None if a part is not known.

    Args:
        grids: noise-to-signal ratio of each tensor's grid; None if the grid's noise is unknown.
            Tensors without a grid are absent.
    """
    total = 0.0
    for tensor in tensors:
        # A tensor without an entry has no grid.
        noise = grids.get(tensor, 0.0)
        if noise is None:
            return None
        total += noise
    return total


class _Between:
    """Nodes between a tensor and its closest compared upstream tensors."""

    def __init__(self, reference: Reading, compared: set[str]) -> None:
        self._graph, self._compared = reference.graph, compared

    def of(self, tensor: str) -> tuple[set[str], set[str]]:
        """Return the names of the nodes, and of their compared inputs.

        Args:
            tensor: a tensor of the float model.

        Returns:
            Names of the nodes from the producer of the tensor back to compared tensors, and names
            of these compared tensors. Both are empty for an input of the model.
        """
        tensors = reach([tensor], self._before)
        nodes = [
            tensor
            for tensor in map(self._graph.producer, tensors)
            if tensor is not None
        ]
        reads = {value for node in nodes for value in node.inputs}
        return {node.name for node in nodes}, reads & self._compared

    def _before(self, tensor: str) -> list[str]:
        """Return the tensors without a comparison that the producer of a tensor reads."""
        node = self._graph.producer(tensor)
        # Compared tensors end the walk. Operands include the tensors that bodies read.
        return (
            []
            if node is None
            else [operand for operand in node.operands if operand not in self._compared]
        )


def _pictured(analysis: Analysis, reference: Reading, measured: Measured) -> Analysis:
    """Add histograms to the worst tensors and the related weights.

    Args:
        analysis: the analysis without histograms.
        measured: the measurements, with the histograms of the tensors.
    """
    # Histograms of weights are computed here, for the pictured nodes alone: each reads the whole
    # weight.
    worst = {value.name for value in analysis.ranking[:TOP]}
    between = _Between(reference, {tensor.name for tensor in analysis.tensors})
    nodes = set[str]().union(*(between.of(name)[0] for name in worst))

    def pictured_tensor(tensor: TensorError) -> TensorError:
        if tensor.name not in worst:
            return tensor
        histogram = measured.tensors[tensor.name].statistic.histogram
        return replace(tensor, histogram=bins(histogram))

    def pictured_weight(weight: WeightError) -> WeightError:
        if weight.node not in nodes or weight.role != "weight":
            return weight
        return with_histogram(weight, reference)

    return replace(
        analysis,
        tensors=[pictured_tensor(tensor) for tensor in analysis.tensors],
        weights=[pictured_weight(weight) for weight in analysis.weights],
    )
