"""One run, from a float model to a quantized model, stage by stage.

``run`` calls the stages in order. Each stage takes the value of the stage before it, and returns a
value of its own, which holds the notes for the report so far.

    Job.open    check the model and the settings           -> Job, with its FloatModel
    _open_data  open the data, hold samples out            -> RunData
    _check_preprocessing  before layer-wise optimizers  -> Job, with its findings
    _prepare    clean and optimize the float graph         -> Prepared
    _plan       decide the format of every tensor          -> Planned
    _measure    measure ranges                             -> MeasuredPlan
    _mix        choose formats of nodes by output errors   -> MeasuredPlan
    _assemble   scales, codes, biases; insert pairs        -> Assembled
    _finish     check, compare, judge and write the model  -> Result

``_assemble_and_finish`` runs the last two, and runs them again with fewer pairs after a crash of
onnxruntime.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnx import ModelProto

from calibrators.onnx_runtime.isolation import current, start
from calibrators.onnx_runtime.tensors import loaded, model_bytes
from calibrators.readers.open import CalibrationData
from calibrators.readers.spool import Spool
from calibrators.shown import printable
from quark_onnx.assemble import Assembled, Assembler, ConfigTrials, RewriteTrials
from quark_onnx.common.errors import ConfigError, RunError, crash_behind
from quark_onnx.common.progress import Progress
from quark_onnx.common.registry import TARGETS
from quark_onnx.common.resume_folder import ResumeFolder
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig
from quark_onnx.graph import describe_closed, tensor_keys
from quark_onnx.graph.states import states
from quark_onnx.measuring.calibrate import calibrate, known_ranges
from quark_onnx.measuring.calibration import Calibration, GraphCalibration
from quark_onnx.measuring.open_data import first_sample, reader_for
from quark_onnx.measuring.random_sample import random_sample
from quark_onnx.measuring.range_files import GivenRanges
from quark_onnx.measuring.run_data import MeasuredPlan, Planned, Prepared, RunData
from quark_onnx.optimizers import (
    AutoMixedPrecision,
    BiasCorrection,
    with_equalization,
)
from quark_onnx.plan import Plan, select
from quark_onnx.planning.float_model import FloatModel, UserModel
from quark_onnx.planning.keep_codes import keep_codes
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.planning.nothing_to_quantize import has_nothing_to_quantize
from quark_onnx.planning.opsets import lower_opset
from quark_onnx.planning.plan_at_opset import plan_at_opset, raise_to_formats
from quark_onnx.planning.prepare import prepare, prepare_again
from quark_onnx.planning.subgraph_plans import all_plans
from quark_onnx.preprocessing import Finding, PreprocessingCheck
from quark_onnx.recipes.kind import kind_of
from quark_onnx.refine import InputMeans, give_biases, optimize_float
from quark_onnx.report import (
    Report,
    ResultNote,
    decibels,
    make_report,
    of_float_model,
    size_change,
    verdicts,
)
from quark_onnx.report.verdict import Scorer
from quark_onnx.scales.spare_movers import spare_movers
from quark_onnx.targets import check_structure, format_of, require_rules, unfit
from quark_onnx.trials.mixed_precision import describe, mix, mixed_plans, require_mixing
from quark_onnx.writing.destination import destination, keeps_weights_beside
from quark_onnx.writing.finish import finish, hand_back
from quark_onnx.writing.judging import judging_of, verdict_of
from quark_onnx.writing.provenance import write_provenance

logger = logging.getLogger(__name__)

#: Bytes of weights up to which the session of the float model stays open during calibration.
_OPEN_SESSION_BYTES = 1 << 25
#: Bytes of weights that a model may read over all held-out samples. Each sample reads all weights
#: once, so that a large model has fewer held-out samples.
_WEIGHT_BYTES_READ = 1 << 32


@dataclass(frozen=True)
class Result:
    """The quantized model with plan and report.

    Attributes:
        model: the quantized model, an ``onnx.ModelProto``.
        plan: the format of each tensor, and the reason for each that stays float.
        report: sizes, errors and verdict; ``print(result.report)`` shows all of it, and
            ``result.report.write_page(path, title)`` writes it as a page.
    """

    model: ModelProto
    plan: Plan
    report: Report

    def __repr__(self) -> str:
        """Return five lines, where the fields would be megabytes."""
        report = self.report
        total = sum(count for _, count in report.operators.values())
        missing = "left out" if report.outputs else "not measured"
        verdict = missing if report.verdict is None else str(report.verdict)
        lines = [
            f"Result: {report.quantized} of {counted(total, 'node')} quantized",
            f"  samples {report.samples} for calibration, {report.held_out} held out",
            f"  size    {size_change(report.bytes_before, report.bytes_after)}",
            f"  SQNR    {decibels(report.worst_sqnr)} dB of the worst output",
            f"  verdict {verdict}",
        ]
        return "\n".join(map(printable, lines))

    def _repr_html_(self) -> str:
        """Return the report, as a notebook shows it."""
        return self.report._repr_html_()


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
    if has_nothing_to_quantize(job.model.graph, job.config):
        plan = make_plan(job.model.graph, job.config, strict=False)
        return _float_model_as_result(job, [plan], job.notes)
    try:
        with Spool() as spool:
            job, run_data = _open_data(job, data, spool, progress)
            job = _check_preprocessing(job, run_data)
            # ``prepared`` is deleted after planning, which may convert its graph to a higher opset:
            # two graphs would take twice the memory.
            try:
                prepared = _prepare(job, run_data, progress)
            except RunError as error:
                if not run_data.is_cut:
                    raise
                raise run_data.on_a_row(error) from error
            planned = _plan(job, prepared, run_data)
            del prepared
            measured = _measure(job, planned, run_data, executor, progress)
            measured = _mix(job, measured, progress)
            if job.nodes_only:
                # Without samples no scale is searched, no layer optimized and no bias corrected.
                without_samples = RunData(measured.data.sample, random=True)
                measured = replace(measured, data=without_samples)
            return _assemble_and_finish(job, measured, progress)
    except Exception:
        # A file of the model that has changed during the run can cause any error.
        job.model.files.require_unchanged()
        raise


@dataclass(frozen=True)
class Job:
    """The start of a run: the float model, the settings, and where to write.

    Attributes:
        config: the settings.
        model: the float model.
        output: the file to write; None to write none.
        external: store large tensors as external data.
        notes: notes for the report.
        resume: folder of the journal of optimized layers; None without any.
        calibration: earlier statistics; None without any.
        task: task of the model, for the verdict; ``auto`` detects it.
        trained: the model before the caller rewrote it, for the check of the preprocessing; None
            without rewrites. It computes the same outputs as ``model``.
        findings: signs of wrong preprocessing that are known before the run; None to look for
            them.
        scorer: a scorer of the data by given labels; None to use labels that come with the data.
        verdict: whether the result is judged in the terms of its task.
        nodes_only: leave out what changes numbers alone: the search of scales, optimizers of
            layers and corrections of biases. The result has the nodes of the full run.
    """

    config: QConfig
    model: FloatModel
    output: Path | None
    external: bool
    notes: list[str]
    resume: Path | None = None
    calibration: Calibration | None = None
    task: str = "auto"
    trained: ModelProto | None = None
    findings: tuple[Finding, ...] | None = None
    scorer: Scorer | None = None
    verdict: bool = True
    nodes_only: bool = False

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
            output: the file to write; None to write none.
            external: store large tensors as external data.
            resume: folder of the journal of optimized layers; None without any.
            ranges: earlier statistics or ranges; None without any.

        Raises:
            ConfigError: the ranges belong to another model, or the target does not take the
                number format.
            ModelError: the model fails a check.
        """
        notes = _target_notes(config)
        # Folders and files are checked before the model is loaded, which may take long.
        ResumeFolder(resume).open()
        output_path = destination(model, output)
        # An isolated process loads onnxruntime while the model is read here.
        start()
        # Before ``UserModel.open``: this check reads the file, too, as a second copy in memory.
        external |= keeps_weights_beside(model, output_path)
        user_model = UserModel.open(model, config)
        calibration = None
        if isinstance(ranges, GivenRanges):
            config = ranges.override(config, user_model.graph)
        elif ranges is not None:
            calibration = ranges
            calibration.require_model(user_model.model)
        select(user_model.graph, config)  # check patterns against the user's graph
        float_model = FloatModel.of(user_model, config, output_path)
        notes = [*float_model.notes, *notes]
        return cls(
            config,
            float_model,
            output_path,
            external,
            notes,
            resume,
            calibration=calibration,
        )

    @property
    def assembler(self) -> Assembler:
        """The assembler of quantized graphs of the float model."""
        return Assembler(self.model.reference, self.model.narrowing, self.resume)

    @property
    def mixed_precision(self) -> AutoMixedPrecision | None:
        """The optimizer that chooses formats of nodes; None without it."""
        for optimizer in self.config.optimizers:
            if isinstance(optimizer, AutoMixedPrecision):
                return optimizer
        return None

    @property
    def gives_ranges(self) -> bool:
        """Whether the configuration has ranges of single tensors."""
        return any(tensor.gives_range for tensor in self.config.tensors)

    @property
    def keeps_rules(self) -> bool:
        """Whether the result must keep every rule of a target."""
        config = self.config
        return bool(config.target) and (
            config.fix_sizes or not TARGETS[config.target].is_static
        )

    def with_note(self, note: str) -> Job:
        """Return the job with a further note for the report."""
        return replace(self, notes=[*self.notes, note])

    def equalizing(self) -> Job:
        """Return the job with equalization if structure and kind of the model call for it.

        Ranges of single tensors in the configuration hold for the model without equalization, which
        is then left out. Statistics of an earlier calibration are no obstacle: they are looked up
        by the computation of a tensor, and tensors that equalization changes are measured again.
        """
        if self.gives_ranges:
            return self
        kind, _ = kind_of(self.model.graph)
        config, reason = with_equalization(self.config, self.model.graph, kind)
        if not reason:
            return self
        return replace(self, config=config).with_note(reason)

    def close(self) -> None:
        """Delete temporary files."""
        self.model.close()


def _target_notes(config: QConfig) -> list[str]:
    """Return notes on a target whose rules are not kept.

    Raises:
        ConfigError: the target does not take the number format.
    """
    if not config.target:
        return []
    refusal = unfit(TARGETS[config.target], config)
    if config.fix_sizes or not TARGETS[config.target].is_static:
        if refusal:
            raise ConfigError(refusal)
        return []
    # Without fixed sizes the model is not final, and the rules of the target are advice.
    notes = [
        f"fix_sizes is false: the rules of {config.target} were not checked;"
        f" 'quark-onnx check --target {config.target}' lists what is broken",
    ]
    if refusal:
        logger.warning("%s", refusal)
        notes.append(refusal)
    return notes


def _open_data(
    job: Job, data: CalibrationData | None, spool: Spool, progress: bool | None
) -> tuple[Job, RunData]:
    """Open the data, or draw a random sample for a run that needs no data and gets none."""
    reference, config = job.model.reference, job.config
    if data is not None and not config.measures and reference.unknown_operator:
        job = job.with_note("the data was not read: the model cannot be run on it")
        data = None
    has_ranges = job.gives_ranges or job.calibration is not None
    if data is None and (has_ranges or not config.measures):
        # Both models are run on the random sample; no range is measured on it.
        # Optimizations such as other layouts of kernels copy the weights.
        reference.save_memory(optimize=job.model.graph.store is None)
        sample = None
        if not reference.unknown_operator:
            sample = random_sample(job.model.graph, reference)
        return job, RunData(sample, random=True)
    # Only with data: known ranges are those of the model without equalization.
    job = job.equalizing()
    return job, RunData.open(
        job.model.graph,
        data,
        job.config,
        spool,
        progress,
        most=_WEIGHT_BYTES_READ // max(1, model_bytes(job.model.original)),
        calibration=job.calibration,
    )


def _check_preprocessing(job: Job, data: RunData) -> Job:
    """Look for wrong preprocessing before layer-wise optimization, whose time would be lost.

    In other runs, and with labels that come with the data, the check is part of the verdict: it
    uses the outputs that calibration computes.
    """
    reference = job.model.reference
    # A correction of biases takes no more time than this check.
    is_costly = any(
        optimizer.stage == "layer" and not isinstance(optimizer, BiasCorrection)
        for optimizer in job.config.optimizers
    )
    is_known = job.findings is not None or bool(reference.unknown_operator)
    if is_costly and not (is_known or data.random or data.labels):
        check = PreprocessingCheck(job.trained or reference.model, job.task)
        for sample in data.rereadable:
            check.add(sample, reference.outputs_once(sample))
            if check.is_full:
                break
        if len(data.rereadable):
            job = replace(job, findings=tuple(check.findings(reference.session)))
    for finding in job.findings or ():
        logger.warning("%s", finding)
    return job


def _prepare(job: Job, data: RunData, progress: bool | None) -> Prepared:
    """Clean the float graph, lower its opset, and run the optimizers of float graphs."""
    config, reference, sample = job.config, job.model.reference, data.sample
    # The order matters: rewrites first, then the opset of the target, then optimizers.
    graph, cleaned = prepare(job.model.graph, config, reference, sample)
    graph, lowered = lower_opset(graph, config.npu, reference, sample)
    if job.keeps_rules:
        # Broken rules are reported before optimizers and calibration, which may take long.
        checked = check_structure(graph.to_model(), config.target, format_of(config))
        require_rules(checked, "nothing was quantized")
    raised = list[str]()
    rewrites_float = any(optimizer.stage == "float" for optimizer in config.optimizers)
    # Earlier statistics have the keys of the graph at its own opset.
    if rewrites_float and job.calibration is None:
        # Once, and not for each graph that optimizers make.
        at_opset, notes = raise_to_formats(graph, config, reference, sample)
        # ``_plan`` says so where it cannot be raised.
        if at_opset is not graph:
            graph, raised = at_opset, notes
    # Receives the statistics that optimizers measure, so that calibration need not measure them
    # again.
    statistics = Calibration("")
    trials = RewriteTrials(job.assembler, config, data, statistics)
    graph, optimized = optimize_float(
        graph, config, reference, sample, data.rereadable, trials.sqnr, show=progress
    )
    graph, cleaned_again = prepare_again(graph, config, sample)
    calibration = job.calibration
    if calibration is None and job.mixed_precision is not None:
        # Mixed precision looks up the ranges of further formats in these statistics.
        calibration = Calibration("")
    keyed, partial = None, None
    if calibration is not None:
        keyed = GraphCalibration(calibration, tensor_keys(graph))
    elif len(statistics):
        partial = statistics
    if len(data.rereadable):  # without samples, no optimizer changes a bias
        give_biases(graph, config)
    rewrites = map(ResultNote, [*cleaned, *lowered, *optimized, *cleaned_again])
    return Prepared(graph, [*job.notes, *rewrites, *raised], keyed, partial)


def _plan(job: Job, prepared: Prepared, data: RunData) -> Planned:
    """Decide the format of every tensor of the graph and of its bodies."""
    require_mixing(prepared.graph, job.config, data.rereadable)
    model = job.model
    config = keep_codes(job.config, prepared.graph, model.narrowing.coded)
    planned = plan_at_opset(prepared.graph, config, model.reference, data.sample)
    notes = prepared.notes
    partial = None
    if prepared.partial is not None:
        # Optimizers have measured tensors of the graph at this opset, and the keys depend on it.
        keys = tensor_keys(planned.graph)
        partial = GraphCalibration(prepared.partial, keys, rich=False)
    if planned.graph.store is not None:
        large_model_note = (
            "a large model: it is verified without onnxruntime's graph"
            " optimizations, to save memory"
        )
        notes = [*notes, large_model_note]
    return Planned(
        config,
        planned.graph,
        planned.plan,
        planned.body_plans,
        [*notes, *planned.notes],
        prepared.keyed,
        partial,
    )


def _measure(
    job: Job,
    planned: Planned,
    data: RunData,
    executor: Executor | None,
    progress: bool | None,
) -> MeasuredPlan:
    """Measure ranges; the same pass computes input means and outputs for later stages."""
    graph, plan, hold_out = planned.graph, planned.plan, data.hold_out
    config, reference = job.config, job.model.reference
    # The session of a large float model is closed: its outputs on a random sample are known, and
    # calibration computes the others in a session of its own.
    if model_bytes(job.model.original) > _OPEN_SESSION_BYTES:
        reference.release()
    if hold_out is None:
        calibrated = known_ranges(graph, plan, planned.body_plans, planned.keyed)
        return planned.measured(calibrated, data)
    means = None
    # Layer optimizers choose the biases themselves.
    stages = [optimizer.stage for optimizer in config.optimizers]
    if config.search and "layer" not in stages and not job.nodes_only:
        # A tensor such as the list of detections may be empty, and has no mean then.
        means = InputMeans(graph, plan.shapes.sized_by_data)

    keep_outputs = data.receive

    def receive(position: int, outputs: Mapping[str, Any]) -> None:
        if keep_outputs is not None:
            keep_outputs(position, outputs)
        if means is not None and position < config.search:
            means.observe(position, outputs)

    with Progress(progress, data.length, "calibrating", "sample") as bar:
        calibrated = calibrate(
            graph,
            plan,
            data.stream,
            planned.body_plans,
            keyed=planned.keyed,
            executor=executor,
            progress=bar.update,
            receive=None if keep_outputs is None and means is None else receive,
            others=mixed_plans(graph, config),
            extended=None if means is None else means.graph,
            partial=planned.partial,
        )
    # Over the first samples, on which biases are corrected and scales are searched.
    if means is not None:
        data = replace(data, input_means=means.over(len(hold_out.first)))
    # The verdict finds these outputs in the reference, which saves another run of the float model.
    for sample, outputs in hold_out.computed():
        reference.remembering.remember(sample, outputs)
    return planned.measured(calibrated, data)


def _mix(job: Job, measured: MeasuredPlan, progress: bool | None) -> MeasuredPlan:
    """Choose formats of nodes by the errors of the outputs, if the settings ask for it."""
    if job.mixed_precision is None:
        return measured
    planned, data = measured.planned, measured.data
    trials = ConfigTrials(job.assembler, planned, measured.ranges, data)
    config, sensitivity = mix(
        trials, job.mixed_precision, data.rereadable, data.untouched, progress
    )
    notes = describe(sensitivity, job.mixed_precision, len(planned.graph.nodes))
    mixed, ranges = trials.measured(config)
    return MeasuredPlan(replace(mixed, notes=[*mixed.notes, *notes]), ranges, data)


def _assemble_and_finish(
    job: Job, measured: MeasuredPlan, progress: bool | None
) -> Result:
    """Assemble, check and write the model, with a second attempt after a crash of onnxruntime.

    The second attempt omits the pairs that onnxruntime moves, which cause the known crashes. It
    needs onnxruntime in a separate process.
    """
    if current() is None:  # without isolation, a crash ends this process
        return _finish(job, _assemble(job, measured, progress), measured, progress)
    planned = measured.planned
    graph = planned.graph.copy()  # for the second attempt: optimizers change the graph
    try:
        return _finish(job, _assemble(job, measured, progress), measured, progress)
    except Exception as error:
        crash = crash_behind(error)
        # A killed process has most likely run out of memory.
        if crash is None or crash.killed:
            raise
        spared = spare_movers(
            graph, planned.config, planned.plan, planned.body_plans, measured.ranges
        )
        if spared is None:
            raise
        logger.warning(
            "%s; trying again with operators that move values left float", crash
        )
    config, plan, body_plans, ranges, note = spared
    planned = replace(
        planned,
        config=config,
        graph=graph,
        plan=plan,
        body_plans=body_plans,
        notes=[*planned.notes, note],
    )
    measured = replace(measured, planned=planned, ranges=ranges)
    return _finish(job, _assemble(job, measured, progress), measured, progress)


def _assemble(job: Job, measured: MeasuredPlan, progress: bool | None) -> Assembled:
    """Compute scales, codes and biases, and insert the pairs; see ``Assembler``."""
    return job.assembler.assemble(
        measured.planned, measured.ranges, measured.data, progress, clipping=True
    )


def _finish(
    job: Job, assembled: Assembled, measured: MeasuredPlan, progress: bool | None
) -> Result:
    """Check the model, compare it with the float model, write it, and report."""
    config, data = measured.planned.config, measured.data
    plans = [assembled.plan, *all_plans(measured.planned.body_plans)]
    # Without quantization the user's own file is the result, not a rewritten one.
    if not assembled.quantized and not config.prepares_float:
        return _float_model_as_result(job, plans, assembled.notes, assembled, data)
    notes = [*assembled.notes]
    notes += [
        f"{note}; keep_initializer_inputs keeps the interface"
        for note in describe_closed(job.model.closed)
    ]
    if not assembled.quantized:
        notes.append(
            "nothing was quantized: the result is the float model, prepared for"
            f" {config.target}",
        )
    write_provenance(assembled.graph, job.config)
    reference = job.model.reference
    # The overrides that ``keep_codes`` added are no settings of the user.
    settings = config.with_(tensors=job.config.tensors)
    judging = judging_of(
        reference, settings, data, job.task, job.trained, job.findings, job.scorer
    )
    finished = finish(
        assembled.graph,
        reference,
        data.compared,
        job.output,
        # A float model always meets the gate.
        min_sqnr=config.min_sqnr if assembled.quantized else None,
        external=job.external,
        files=job.model.files,
        narrowing=job.model.narrowing,
        functions=config.functions,
        judging=judging,
        target=config.target if job.keeps_rules else "",
        frugal=data.random,
        progress=progress,
    )
    verdict, warnings = None, list[str]()
    if job.verdict:
        verdict, warnings = verdict_of(judging, finished, data, reference)
    scorer = judging.scorer
    if finished.errors:
        notes += [
            *verdicts(finished.errors, states(assembled.graph)),
            *finished.notes,
            *data.notes,
        ]
    else:
        notes += finished.notes
    report = make_report(
        job.config,
        plans,
        job.model.original,
        finished.model,
        notes,
        samples=data.count,
        held_out=len(data.held_out),
        outputs=finished.errors,
        layers=assembled.layers,
    )
    report = replace(
        report,
        verdict=verdict,
        warnings=warnings,
        clipping=assembled.clipping,
        exhibits=judging.collector.exhibits,
        scores=[] if scorer is None else scorer.scores(),
        labelled=0 if scorer is None else scorer.count,
    )
    logger.debug("%s", report)
    return Result(loaded(finished.model), assembled.plan, report)


def _float_model_as_result(
    job: Job,
    plans: Sequence[Plan],
    notes: Sequence[str],
    assembled: Assembled | None = None,
    data: RunData | None = None,
) -> Result:
    """Return the float model, and write it, as no tensor was quantized.

    Args:
        plans: the plans of the graph and of its bodies.
        assembled: the graph in which nothing was quantized; None without a run.
        data: the data of the run; None without a run.
    """
    reference = None if assembled is None else job.model.reference
    finished = hand_back(
        job.model.original,
        reference,
        job.model.source,
        job.output,
        files=job.model.files,
        external=job.external,
    )
    report = make_report(
        job.config,
        plans,
        job.model.original,
        finished.model,
        [*of_float_model(notes), *finished.notes],
        samples=0 if data is None else data.count,
        layers=[] if assembled is None else assembled.layers,
    )
    logger.debug("%s", report)
    return Result(finished.model, plans[0], report)


def measure_ranges(
    job: Job,
    data: CalibrationData | None,
    executor: Executor | None,
    progress: bool | None,
) -> Calibration:
    """Measure statistics for every calibrator, on the entire data.

    Args:
        job: the model and the settings, with a calibration, which receives the statistics.
        data: calibration data.
        executor: runs calibration; None for the default.
        progress: as for ``quantize_static``.

    Returns:
        The calibration of the job.

    Raises:
        DataError: the data does not fit the model.
    """
    assert job.calibration is not None
    if has_nothing_to_quantize(job.model.graph, job.config):
        return job.calibration
    reader = reader_for(job.model.graph, data, job.config)
    first_data = RunData(first_sample(reader))
    planned = _plan(job, _prepare(job, first_data, progress), first_data)
    # XINT8 quantizes the most tensors, including outputs: with its plan, statistics serve every
    # configuration.
    largest_plan = make_plan(planned.graph, QConfig.of("XINT8"), strict=False)
    with Progress(progress, reader.length, "calibrating", "sample") as bar:
        calibrate(
            planned.graph,
            planned.plan,
            reader,
            keyed=planned.keyed,
            others=(largest_plan,),
            executor=executor,
            progress=bar.update,
        )
    return job.calibration
