"""A job: a run from a float model to a quantized model, step by step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto

from calibrators.onnx_runtime.isolation import current, start
from calibrators.onnx_runtime.session import model_bytes
from calibrators.readers.open import CalibrationData
from calibrators.readers.spool import Spool
from calibrators.shown import short
from quark_onnx.assemble import Assembler, RewriteTrials, Trials
from quark_onnx.check.inlined import inlined
from quark_onnx.check.static_shapes import fixed
from quark_onnx.common.errors import ConfigError, DataError, crash_behind, data_errors
from quark_onnx.common.progress import Progress
from quark_onnx.common.registry import TARGETS
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig
from quark_onnx.files.half_precision import OriginalDtypes, upcast_to_float32
from quark_onnx.files.io import load
from quark_onnx.graph import (
    Graph,
    describe_closed,
    gather_constants,
    model_key,
    store_for,
    tensor_keys,
)
from quark_onnx.graph.shapes import without_all_parameters
from quark_onnx.graph.states import states
from quark_onnx.measuring.calibrate import (
    Calibrated,
    HoldOut,
    Ranges,
    calibrate,
    missing,
    samples_for,
    stretch,
    unmeasured,
)
from quark_onnx.measuring.calibration import Calibration, Keyed
from quark_onnx.measuring.open_data import first_sample, reader_for
from quark_onnx.measuring.random_sample import random_sample
from quark_onnx.measuring.range_files import GivenRanges
from quark_onnx.measuring.run_data import Planned, RunData
from quark_onnx.optimizers import AutoMixedPrecision, with_equalization
from quark_onnx.optimizers.problem import LayerResult
from quark_onnx.patterns.coded_constants import coded_constants
from quark_onnx.patterns.slow_depthwise import describe_slow_depthwise
from quark_onnx.plan import Plan, select
from quark_onnx.plan.blocks import describe_blocks
from quark_onnx.planning.keep_codes import keep_codes
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.planning.nothing_to_quantize import has_nothing_to_quantize
from quark_onnx.planning.opsets import lower_opset
from quark_onnx.planning.plan_at_opset import plan_at_opset
from quark_onnx.planning.prepare import prepare, prepare_again
from quark_onnx.planning.subgraph_plans import all_plans, give_up_late
from quark_onnx.preprocessing import Finding, PreprocessingCheck
from quark_onnx.refine import InputMeans, check_folder, give_biases, optimize_float
from quark_onnx.report import Report, kept_types, summarize, verdicts
from quark_onnx.report.verdict import VerdictCollector
from quark_onnx.running.run import Reference, Sample
from quark_onnx.scales.spare_movers import spare_movers
from quark_onnx.targets import check_structure, format_of, require_rules, unfit
from quark_onnx.trials.mixed_precision import describe, mix, mixed_plans, require_mixing
from quark_onnx.writing.destination import destination, keeps_weights_beside
from quark_onnx.writing.finish import Finished, Judging, finish, hand_back
from quark_onnx.writing.provenance import write_provenance
from quark_onnx.writing.run_settings import settings_of_config

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """The quantized model with plan and report."""

    model: ModelProto
    plan: Plan
    report: Report


def run(
    job: Job,
    data: CalibrationData | None,
    executor: Executor | None,
    progress: bool | None,
) -> Result:
    """Run a job from the data to the final model.

    Args:
        job: the model and the settings.
        data: calibration data; None if none is needed.
        executor: runs calibration; None for the default.
        progress: as for ``quantize_static``.
    """
    if has_nothing_to_quantize(job.graph, job.config):
        return job.handed_back()
    if data is not None and not job.config.measures and job.reference.unknown_operator:
        unread = "the data was not read: the model cannot be run on it"
        return run(job.with_note(unread), None, executor, progress)
    # A run without data: nothing is measured, or an earlier calibration has the ranges.
    if data is None and (not job.config.measures or job.has_ranges):
        job.reference.save_memory()
        # Random samples to run both models on; no range is measured on them.
        made_up = RunData(_random_sample(job), random=True)
        planned = job.plan(made_up, progress)
        # The outputs on the sample are known.
        job.release_reference()
        # Ranges of single tensors in the config may leave others unknown: then data is required.
        if job.calibration is not None or not unmeasured(planned.graph, planned.plan):
            known = _known_ranges(planned)
            measured = planned.with_plans(known.plan, known.insides)
            return job.finish(measured, known.ranges, made_up, progress)
        names = short(unmeasured(planned.graph, planned.plan))
        raise DataError(
            f"the given ranges lack tensors ({names}), and no calibration data was given;"
            " give data as well",
        )
    # Not above: without data, the ranges are those of the model without equalization.
    return _run_on_data(job.equalizing(), data, executor, progress)


def _random_sample(job: Job) -> Sample | None:
    """Return a sample that the float model runs on; None where onnxruntime lacks an operator."""
    if job.reference.unknown_operator:
        return None
    return random_sample(job.graph, job.reference)


def _run_on_data(
    job: Job,
    data: CalibrationData | None,
    executor: Executor | None,
    progress: bool | None,
) -> Result:
    """Run a job that measures ranges, or errors, on data; see ``run``."""
    config = job.config
    reader = reader_for(job.graph, data, config)
    # Read before anything else, so that unusable data fails early.
    first = first_sample(reader)
    # An entry may be a batch, so this is a lower bound.
    least = len(data) if isinstance(data, list | tuple) else None
    # Recurrent models are measured over consecutive samples, since each step reads the state of
    # the last.
    run = stretch(reader.length or least) if states(job.graph) else range(0)
    is_real = not reader.random
    held = HoldOut(
        reader,
        remember=config.search,
        run=run,
        verdict=is_real,
        most=_affordable(job.original),
    )
    # The spool keeps all samples for steps that read them again; generators can be read once
    # only.
    with Spool() as spool:
        if config.rereads:
            _read(held, spool, reader.length, progress)
        # Float outputs are computed during calibration; they serve the verdict if no rewrite
        # changed them.
        shares = is_real and job.config.keeps_function
        run_data = RunData(
            first,
            held,
            spool,
            receive=held.receive if shares else None,
            random=reader.random,
            calibration=job.calibration,
        )
        planned = job.plan(run_data, progress)
        # After the plan, which compared rewrites with the float model.
        job.release_reference()
        means = None
        if job.corrects_biases:
            # A tensor such as the list of detections may be empty, and has no mean then.
            sized_by_data = planned.plan.shapes.sized_by_data
            means = InputMeans(planned.graph, sized_by_data)

        def receive(position: int, outputs: Mapping[str, Any]) -> None:
            if shares:
                held.receive(position, outputs)
            if means is not None and position < config.search:
                means.observe(position, outputs)

        with Progress(progress, reader.length, "calibrating", "sample") as bar:
            calibrated = calibrate(
                planned.graph,
                planned.plan,
                spool if config.rereads else held,
                planned.insides,
                keyed=planned.keyed,
                executor=executor,
                progress=bar.update,
                receive=receive if shares or means is not None else None,
                others=mixed_plans(planned.graph, job.config),
                extended=None if means is None else means.graph,
                begun=planned.begun,
            )
        # Means over the first samples, on which biases are corrected and scales are searched.
        if means is not None:
            run_data = replace(run_data, input_means=means.over(len(held.first)))
        # The verdict finds these outputs there, instead of another run of the float model.
        for sample, outputs in held.computed():
            job.reference.remembering.remember(sample, outputs)
        measured = planned.with_plans(calibrated.plan, calibrated.insides)
        ranges = calibrated.ranges
        if job.mixing is not None:
            measured, ranges = _mixed(
                job, job.mixing, measured, ranges, run_data, progress
            )
        return _finished(job, measured, ranges, run_data, progress)


def _mixed(  # noqa: PLR0913
    job: Job,
    settings: AutoMixedPrecision,
    planned: Planned,
    ranges: Ranges,
    data: RunData,
    progress: bool | None,
) -> tuple[Planned, Ranges]:
    """Return the plan and the ranges in which nodes have the formats that a target needs.

    Args:
        settings: the target, and the formats to choose between.
        planned: the plan in the format of the configuration.
        progress: as for ``quantize_static``.
    """
    trials = Trials(Assembler(job.reference, job.narrowing), planned, ranges, data)
    config, result = mix(trials, settings, data.again, data.held_out, progress)
    notes = describe(result, settings, len(planned.graph.nodes))
    changed, ranges = trials.measured(config)
    return replace(changed, notes=[*notes, *changed.notes]), ranges


def _known_ranges(planned: Planned) -> Calibrated:
    """Return the ranges of an earlier calibration, for a run without data.

    Raises:
        ConfigError: ranges are missing.
    """
    if planned.keyed is None:
        return Calibrated(planned.plan, {}, planned.insides)
    unknown = missing(planned.graph, planned.plan, planned.keyed)
    # Everything is known: no sample is needed.
    if not unknown and not planned.insides:
        return calibrate(planned.graph, planned.plan, (), keyed=planned.keyed)
    calibration = planned.keyed.calibration
    source = f"ranges {calibration.source}".strip()
    if not unknown:
        raise ConfigError(
            f"{source}: the model has bodies (If, Loop or Scan), whose tensors are"
            " measured in each run; give data",
        )
    names = short([observation.tensor for observation in unknown])
    raise ConfigError(
        f"{source}: {counted(len(unknown), 'tensor lacks', 'tensors lack')} a statistic"
        f" that this configuration needs ({names}); there are"
        f" {', '.join(calibration.kinds) or 'none'} of"
        f" {counted(len(calibration), 'tensor')}; give data, or measure anew",
    )


def _finished(
    job: Job, planned: Planned, ranges: Ranges, data: RunData, progress: bool | None
) -> Result:
    """Finish a run, with a second attempt after a crash of onnxruntime.

    The second attempt omits the pairs that onnxruntime moves, which cause the known crashes. It
    needs onnxruntime in a separate process.
    """
    if current() is None:  # without isolation, a crash ends this process
        return job.finish(planned, ranges, data, progress)
    graph = planned.graph.copy()  # optimizers change it
    try:
        return job.finish(planned, ranges, data, progress)
    except Exception as error:
        crash = crash_behind(error)
        # A killed process has most likely run out of memory.
        if crash is None or crash.killed:
            raise
        again = spare_movers(
            graph, planned.config, planned.plan, planned.insides, ranges
        )
        if again is None:
            raise
        logger.warning(
            "%s; trying again with operators that move values left float", crash
        )
    config, plan, insides, ranges, note = again
    return job.finish(
        Planned(config, graph, plan, insides, [*planned.notes, note], planned.rewrites),
        ranges,
        data,
        progress,
    )


def _read(
    held: HoldOut, spool: Spool, length: int | None, progress: bool | None
) -> None:
    """Read all samples.

    Raises:
        DataError: a sample does not fit the model.
    """
    with Progress(progress, length, "reading", "sample") as bar, data_errors():
        for count, sample in enumerate(held, 1):
            spool.append(sample)
            bar.update(count)


#: Bytes of weights up to which the session of the float model stays open during calibration.
_KEPT = 1 << 25

#: Limit of weight bytes read over all measured samples, per model: a large model runs on fewer
#: samples.
_VERDICT_WORK = 1 << 32


def _affordable(model: ModelProto) -> int:
    """Return the maximum number of samples that a model is measured on."""
    # Each sample reads all weights once.
    return _VERDICT_WORK // max(1, model_bytes(model))


@dataclass(frozen=True)
class Job:
    """The start of a run: settings, output path, float model and source file.

    Attributes:
        closed: inputs of the float model that become constants of the result, because they are
            initializers.
        task: task of the model, for the verdict; ``auto`` detects it.
        calibration: earlier statistics; None for none.
        trained: the model before rewrites of the caller, for the check of the preprocessing; it
            computes the same outputs. None if ``original`` is that model.
        weights: arrays of the held tensors of ``original``, which last as long as the job.
        findings: signs of wrong preprocessing that are known before the run; None to look for
            them.
    """

    config: QConfig
    target: Path | None
    external: bool
    original: ModelProto
    graph: Graph
    reference: Reference
    narrowing: OriginalDtypes
    resume: Path | None = None
    notes: tuple[str, ...] = ()
    source: Path | None = None
    closed: tuple[str, ...] = ()
    task: str = "auto"
    calibration: Calibration | None = None
    trained: ModelProto | None = None
    weights: tuple[NDArray[Any], ...] = ()
    findings: tuple[Finding, ...] | None = None

    @classmethod
    def open(  # noqa: PLR0913
        cls,
        model: str | Path | ModelProto,
        config: QConfig,
        output: str | Path | None,
        external: bool,
        resume: Path | None = None,
        ranges: Calibration | GivenRanges | None = None,
    ) -> Job:
        """Load the model, and check the settings and the output path.

        Args:
            model: path of the float model, or a ModelProto.
            config: the settings.
            output: the file to write; None for none.
            external: store large tensors as external data.
            resume: folder of the journal of optimized layers; None for none.
            ranges: earlier statistics or ranges; None for none.

        Raises:
            ConfigError: the ranges belong to another model, or the target does not take the
                number format.
        """
        refused = unfit(TARGETS[config.target], config) if config.target else ""
        if refused and config.fix_sizes:
            raise ConfigError(refused)
        # Folders and files are checked before the model is loaded, which may take long.
        check_folder(resume)
        target = destination(model, output)
        # An isolated process loads onnxruntime while the model is read here.
        start()
        # Before the model is in memory, as it reads the file, too.
        external |= keeps_weights_beside(model, target)
        weights: list[NDArray[Any]] = []
        corrected = list[str]()
        original = load(model, weights, corrected)
        notes = [*corrected]
        narrow = inlined(original)
        graph = _graph_to_plan(narrow, config)
        # Ranges by name, of a cache of TensorRT or onnxruntime.
        if isinstance(ranges, GivenRanges):
            config = ranges.override(config, graph)
        elif ranges is not None:
            _check_model(ranges, original)
        select(graph, config)  # check patterns against the user's graph
        # In the folder of the target; without a target in the temporary folder.
        store = store_for(original, target)
        plain, narrowing = upcast_to_float32(narrow, store)
        graph = graph if plain is narrow else Graph.of(plain)
        graph.store = store
        # Not the file of a model whose declarations were corrected.
        source = None
        if isinstance(model, str | Path) and not corrected:
            source = Path(model)
        # The file itself, if the model is unchanged: onnxruntime opens it instead of a copy in
        # memory.
        reference = Reference(plain, source if plain is original else None)
        closed = tuple(
            gather_constants(graph, keep_inputs=config.keep_initializer_inputs),
        )
        # A constant has no type at the interface to restore.
        narrowing.forget_inputs(closed)
        narrowing.coded = coded_constants(graph)
        if config.target and config.fix_sizes:
            graph, sized = fixed(graph)
            notes += sized
        # Without fixed sizes the model is not final, and the rules of the target are advice.
        if config.target and not config.fix_sizes:
            notes.append(
                f"fix_sizes is false: the rules of {config.target} were not checked;"
                " 'quark-onnx npu check' lists what is broken",
            )
        if refused:
            logger.warning("%s", refused)
            notes.append(refused)
        return cls(
            config,
            target,
            external,
            original,
            graph,
            reference,
            narrowing,
            resume,
            tuple(notes),
            source,
            closed,
            weights=tuple(weights),
            calibration=ranges if isinstance(ranges, Calibration) else None,
        )

    def release_reference(self) -> None:
        """Free the session of a large float model: calibration computes its outputs, too."""
        if model_bytes(self.original) > _KEPT:
            self.reference.release()

    @property
    def corrects_biases(self) -> bool:
        """Whether biases are corrected by means of layer inputs, if there are samples."""
        optimizers = self.config.optimizers
        return bool(self.config.search) and not any(
            optimizer.stage == "layer" for optimizer in optimizers
        )

    @property
    def mixing(self) -> AutoMixedPrecision | None:
        """The optimizer that chooses formats of nodes; None without it."""
        for optimizer in self.config.optimizers:
            if isinstance(optimizer, AutoMixedPrecision):
                return optimizer
        return None

    @property
    def has_ranges(self) -> bool:
        """Whether ranges are known before the run."""
        return self.gives_ranges or self.calibration is not None

    @property
    def gives_ranges(self) -> bool:
        """Whether the configuration has ranges of single tensors."""
        return any(tensor.gives_range for tensor in self.config.tensors)

    def equalizing(self) -> Job:
        """Return the job with the optimizers that the structure of the model calls for.

        Given ranges of single tensors are those of the model without them. Statistics of a
        calibration have keys: tensors that equalization changes are measured on the data.
        """
        if self.gives_ranges:
            return self
        config, reason = with_equalization(self.config, self.graph)
        if not reason:
            return self
        return replace(self, config=config).with_note(reason)

    def with_note(self, note: str) -> Job:
        """Return the job with a further note for the report."""
        return replace(self, notes=(*self.notes, note))

    def handed_back(self) -> Result:
        """Return the float model, and write it, without a run: no operator can be quantized."""
        plan = make_plan(self.graph, self.config, strict=False)
        done = hand_back(
            self.original, None, self.source, self.target, external=self.external
        )
        report = self._report([plan], done, [*self.notes], RunData(), [])
        return Result(done.model, plan, report)

    def close(self) -> None:
        """Delete temporary files."""
        if self.graph.store is not None:
            self.graph.store.close()

    def plan(self, data: RunData, progress: bool | None) -> Planned:
        """Clean and optimize the float graph, and decide the format of every tensor.

        Args:
            data: the data of the run.
            progress: as for ``quantize_static``.
        """
        sample, samples = data.sample, data.again
        # The order matters: rewrites first, then the opset of the target, then optimizers on this
        # graph.
        graph, prepared = prepare(self.graph, self.config, self.reference, sample)
        graph, lowered = lower_opset(graph, self.config.target, self.reference, sample)
        self._require_structure(graph)
        # Statistics that optimizers measure anyway, and calibration need not measure again.
        measured = Calibration("")
        trials = RewriteTrials(self._assembler, self.config, data, measured)
        graph, improved = optimize_float(
            graph,
            self.config,
            self.reference,
            sample,
            samples,
            trials.sqnr,
            show=progress,
        )
        graph, again = prepare_again(graph, self.config, sample)
        rewrites, notes = [*prepared, *lowered, *improved, *again], list[str]()
        keyed = self._keyed(graph)
        begun = None
        if keyed is None and len(measured):
            begun = Keyed(measured, tensor_keys(graph), rich=False)
        if len(samples):  # no optimizer moves a bias without samples
            give_biases(graph, self.config)
        require_mixing(graph, self.config, samples)
        config = keep_codes(self.config, graph, self.narrowing.coded)
        at_opset = plan_at_opset(graph, config, self.reference, sample)
        graph = at_opset.graph
        insides = give_up_late(at_opset.insides, vendor=self.config.form == "vendor")
        if graph.store is not None:
            notes.append(
                "a large model: it is verified without onnxruntime's graph"
                " optimizations, to save memory",
            )
        return Planned(
            config,
            graph,
            at_opset.plan,
            insides,
            [*notes, *at_opset.notes],
            rewrites,
            keyed,
            begun,
        )

    def _require_structure(self, graph: Graph) -> None:
        """Raise ConstraintError if the prepared graph breaks rules that quantization keeps.

        Called before optimizers and calibration, which may take long.
        """
        if not self.keeps_promise:
            return
        kind = format_of(self.config)
        checked = check_structure(graph.to_model(), self.config.target, kind)
        require_rules(checked, "nothing was quantized")

    @property
    def keeps_promise(self) -> bool:
        """Whether the result must keep every rule of a target."""
        return bool(self.config.target) and self.config.fix_sizes

    def _keyed(self, graph: Graph) -> Keyed | None:
        """Return the earlier statistics for tensors of the float graph."""
        calibration = self.calibration
        if calibration is None and self.mixing is not None:
            calibration = Calibration("")  # further formats are tried with these ranges
        if calibration is None:
            return None
        return Keyed(calibration, tensor_keys(graph))

    @property
    def _assembler(self) -> Assembler:
        return Assembler(self.reference, self.narrowing, self.resume)

    def finish(
        self, planned: Planned, ranges: Ranges, data: RunData, progress: bool | None
    ) -> Result:
        """Compute scales and codes, insert nodes, and write the file and the report.

        Args:
            planned: the prepared graph and its plans.
            ranges: the calibrated ranges.
            data: the data of the run.
            progress: as for ``quantize_static``.
        """
        config = planned.config
        made = self._assembler.assemble(planned, ranges, data, progress, clipping=True)
        plans = [made.plan, *all_plans(planned.insides)]
        # The user's file is returned, not a rewritten one with equal function.
        if not made.quantized and not config.target:
            done = hand_back(
                self.original,
                self.reference,
                self.source,
                self.target,
                external=self.external,
            )
            notes = [*self.notes, *made.notes]
            report = self._report(plans, done, notes, data, made.layers)
            return Result(done.model, made.plan, report)
        notes = [*self.notes, *planned.rewrites, *made.notes, *made.sums]
        notes += [
            f"{note}; keep_initializer_inputs keeps the interface"
            for note in describe_closed(self.closed)
        ]
        if not made.quantized:
            notes.append(
                "nothing was quantized: the result is the float model, prepared for"
                f" {config.target}",
            )
        write_provenance(made.graph, self.config)
        # Scales of stored codes are no setting of the user.
        judging = self._judging(config.with_(tensors=self.config.tensors), data)
        done = finish(
            made.graph,
            self.reference,
            data.measured,
            self.target,
            # A float model always meets the gate.
            min_sqnr=config.min_sqnr if made.quantized else None,
            external=self.external,
            narrowing=self.narrowing,
            functions=config.functions,
            judging=judging,
            target=config.target if self.keeps_promise else "",
            frugal=data.random,
        )
        verdict = judging.collector.verdict(
            done.errors,
            held_out=len(data.held_out),
            random=data.random,
            settings=judging.advice,
            samples_for=samples_for,
        )
        findings = self._findings(judging)
        if findings and verdict is not None:
            verdict = verdict.doubted(findings[0].next_step)
        if done.errors:
            notes += verdicts(done.errors, states(made.graph))
        report = replace(
            self._report(plans, done, notes, data, made.layers),
            verdict=verdict,
            warnings=[*map(str, findings)],
            clipping=made.clipping,
            exhibits=judging.collector.exhibits,
        )
        return Result(done.model, made.plan, report)

    def _judging(self, config: QConfig, data: RunData) -> Judging:
        """Return the receivers of both models' outputs.

        Args:
            config: settings of the run, for the advice after a bad verdict.
        """
        check = None
        if not data.random and self.findings is None:
            check = PreprocessingCheck(self.trained or self.reference.model, self.task)
        return Judging(
            VerdictCollector(self.reference.model, self.task),
            check,
            settings_of_config(config, data.count),
            data.further,
            self.findings or (),
        )

    def _findings(self, judging: Judging) -> list[Finding]:
        """Return and log signs of wrong preprocessing."""
        findings = [*judging.findings]
        if judging.check is not None:
            findings = judging.check.findings(self.reference.remembering)
        for finding in findings:
            logger.warning("%s", finding)
        return findings

    def _report(
        self,
        plans: list[Plan],
        done: Finished,
        notes: list[str],
        data: RunData,
        layers: list[LayerResult],
    ) -> Report:
        operators, kept_nodes, kept_tensors = summarize(*plans)
        notes = [*describe_blocks(plans), *notes, *done.notes]
        if done.errors:
            notes += data.notes
        # The kernel concerns onnxruntime on the CPU, not a processor that is targeted.
        if not self.config.target and (slow := describe_slow_depthwise(done.model)):
            notes.append(slow)
        before, after = model_bytes(self.original), model_bytes(done.model)
        if after > before and any(count for count, _ in operators.values()):
            notes.append(
                "the result is larger than the float model: weights stay float, or are"
                " small, or are stored more than once",
            )
        report = Report(
            config=str(self.config),
            samples=data.count,
            held_out=len(data.held_out) if done.errors else 0,
            bytes_before=before,
            bytes_after=after,
            operators=operators,
            kept_nodes=kept_nodes,
            kept_tensors=kept_tensors,
            notes=notes,
            outputs=done.errors,
            layers=layers,
            kept_types=kept_types(*plans),
        )
        logger.debug("%s", report)
        return report


def _graph_to_plan(model: ModelProto, config: QConfig) -> Graph:
    """Return the graph of a model; one without the parameters of trees if these are all it has."""
    light = without_all_parameters(model)
    graph = Graph.of(light)
    if light is model or has_nothing_to_quantize(graph, config):
        return graph
    return Graph.of(model)


def _check_model(calibration: Calibration, model: ModelProto) -> None:
    """Raise ConfigError for ranges of another model; assign unassigned ranges."""
    # A hash, as the file may have moved.
    key = model_key(model)
    if not calibration.model:
        calibration.model = key
    if calibration.model != key:
        raise ConfigError(
            f"ranges {calibration.source or 'given'} were measured on another model;"
            " measure anew with quark-onnx calibrate",
        )


def measure_ranges(
    job: Job,
    data: CalibrationData | None,
    executor: Executor | None,
    progress: bool | None,
) -> Calibration:
    """Measure statistics for every calibrator, on the entire data.

    Args:
        job: the model and the settings.
        data: calibration data.
        executor: runs calibration; None for the default.
        progress: as for ``quantize_static``.

    Returns:
        The calibration of the job.

    Raises:
        DataError: the data does not fit the model.
    """
    assert job.calibration is not None
    if has_nothing_to_quantize(job.graph, job.config):
        return job.calibration
    reader = reader_for(job.graph, data, job.config)
    first = first_sample(reader)
    planned = job.plan(RunData(first), progress)
    # XINT8 quantizes the most tensors, including outputs
    most = make_plan(planned.graph, QConfig.of("XINT8"), strict=False)
    with Progress(progress, reader.length, "calibrating", "sample") as bar:
        calibrate(
            planned.graph,
            planned.plan,
            reader,
            keyed=planned.keyed,
            others=(most,),
            executor=executor,
            progress=bar.update,
        )
    return job.calibration
