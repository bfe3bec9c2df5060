"""advise: try the changes that a verdict proposes, and return those that help."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from onnx import ModelProto

from calibrators.onnx_runtime.isolation import isolated
from calibrators.readers.open import CalibrationData
from calibrators.readers.spool import Spool
from quark_onnx.analysis.paired import Paired
from quark_onnx.analysis.result import Analysis
from quark_onnx.check.inlined import inlined
from quark_onnx.common.errors import (
    AccuracyError,
    ModelError,
    crash_errors,
    data_errors,
)
from quark_onnx.common.progress import Progress
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig
from quark_onnx.config.checks import require
from quark_onnx.files.half_precision import upcast_to_float32
from quark_onnx.files.io import load
from quark_onnx.graph import Graph
from quark_onnx.graph.states import states
from quark_onnx.job import Result
from quark_onnx.measuring.calibration import Calibration
from quark_onnx.measuring.held_out import held_out_samples
from quark_onnx.measuring.open_data import reader_for
from quark_onnx.report import Report, percentage
from quark_onnx.report.measure import OutputError, least_sqnr
from quark_onnx.report.verdict import (
    THRESHOLDS,
    Figure,
    Gain,
    NextStep,
    Verdict,
    changed,
    is_possible,
    next_steps,
)
from quark_onnx.report.verdict.advice import MOST
from quark_onnx.report.verdict.verdict import BANDS
from quark_onnx.running.run import Sample
from quark_onnx.search.checks import check_budget
from quark_onnx.search.runs import Outcome, Runs
from quark_onnx.search.space import relative_cost
from quark_onnx.trials.judge import judge_models
from quark_onnx.trials.latency import Latency, measure_latency
from quark_onnx.writing.run_settings import settings_of_config, settings_of_model

#: Options that take the names of several nodes or tensors.
_OF_SEVERAL = ("--exclude", "--tensor-calibrator")
#: Number of tensors whose causes propose fixes, and of nodes in an exclusion.
_RANKED, _EXCLUDED = 10, 3
#: Least gain in dB. A smaller one may be chance.
_LEAST = 0.3
#: Least change of the deciding figure, in units of one sample or one percent.
_CHANCE = 1.5
#: A ratio of latencies from which a change costs runtime.
_COSTLY = 1.25
#: Default budget in seconds, at most; the run itself may take less.
BUDGET = 30.0
#: Number of samples that a model from a file is quantized on anew.
SAMPLES = 100

#: A function from a step to the configuration with its change.
Configure = Callable[[NextStep], QConfig | None]


@dataclass(frozen=True)
class Reached:
    """SQNR, verdict and latency of a model on held-out samples.

    Attributes:
        sqnr: SQNR of the worst output in dB; infinite without an error.
        verdict: the verdict.
        latency: latency of the float model and of this one; None if not measured.
    """

    sqnr: float
    verdict: Verdict
    latency: Latency | None = None

    @classmethod
    def of(
        cls, outputs: Iterable[OutputError], verdict: Verdict | None
    ) -> Reached | None:
        """Return the judgement of a model; None without a verdict."""
        if verdict is None:
            return None
        return cls(least_sqnr(list(outputs), np.inf), verdict)

    @property
    def figure(self) -> Figure | None:
        """Return the figure that decides the band, unless it is the SQNR."""
        deciding = {threshold.figure for threshold in THRESHOLDS[self.verdict.task]}
        for figure in self.verdict.figures:
            if figure.name in deciding and figure.name != "sqnr":
                return figure
        return None

    def gain(self, other: Reached, gate: float | None = None) -> Gain:
        """Return the gain of another model over this one.

        Args:
            other: what the other model reaches.
            gate: minimum SQNR in dB that this model missed; None without one.
        """
        runtime = float_runtime = None
        if self.latency is not None and other.latency is not None:
            # Each model ran in turns with the float model: the ratio of ratios is steadier.
            own = self.latency.other_ms / self.latency.reference_ms
            float_runtime = other.latency.other_ms / other.latency.reference_ms
            runtime = float_runtime / own
        return Gain(
            (self.sqnr, other.sqnr),
            _change(self.figure, other.figure),
            runtime,
            float_runtime,
            self.verdict.samples,
            gate,
        )

    def is_worse_than(self, other: Reached) -> bool:
        """Return whether another model has a better band, or is better by more than chance.

        In the same band, neither the SQNR nor the deciding figure may be worse by more than chance.
        """
        own, others = self.verdict.band, other.verdict.band
        if own in BANDS and others in BANDS and own != others:
            return BANDS.index(others) < BANDS.index(own)
        decibels = self.gain(other).decibels
        progress = self._progress(other)
        if decibels >= _LEAST:
            return progress >= -_CHANCE
        return progress > _CHANCE and decibels > -_LEAST

    def _progress(self, other: Reached) -> float:
        """Return the rise of the deciding figure, in units of one sample or one percent."""
        before, after = self.figure, other.figure
        if before is None or after is None or before.name != after.name:
            return 0.0
        unit = max(1.0 / max(1, self.verdict.samples), 0.01 * abs(before.value))
        rise = (after.value - before.value) / unit
        for threshold in THRESHOLDS[self.verdict.task]:
            if threshold.figure == before.name and not threshold.rising:
                return -rise
        return rise


def _change(before: Figure | None, after: Figure | None) -> str:
    """Return two values of a figure as text; empty if one is missing, or if they are equal."""
    if before is None or after is None or before.value == after.value:
        return ""
    # Shares are percent; divergences and decibels are numbers.
    if before.name in ("agreement", "f1", "equal", "iou"):
        return f"{before.name} {100 * before.value:.1f} -> {100 * after.value:.1f} %"
    return f"{before.name} {before.value:.4g} -> {after.value:.4g}"


@dataclass(frozen=True)
class Trying:
    """How changes are tried.

    Attributes:
        task: task of the model, as for ``quantize``.
        budget: time limit in seconds for all trials. A trial that would exceed it is not started.
        timed: whether to measure the latency of the models; not for a target.
        progress: as for ``quantize_static``.
        ranges: earlier ranges of the run; None to measure them.
        configure: function from a step to the configuration with its change, or None for a change
            of the data; ``changed`` unless given.
        gate: minimum SQNR in dB that the run missed; None without one.
    """

    task: str = "auto"
    budget: float = BUDGET
    timed: bool = True
    progress: bool | None = False
    ranges: Calibration | str | Path | None = None
    configure: Configure | None = None
    gate: float | None = None


@dataclass(frozen=True)
class Baseline:
    """A run to improve.

    Attributes:
        model: the float model.
        quantized: the quantized model; None for one that missed the gate.
        config: the configuration of the run.
        reached: what the quantized model reaches on the samples that the run held out; None for a
            model from a file, which is judged on those that the trials hold out.
        task: task of the verdict.
    """

    model: ModelProto
    quantized: str | Path | ModelProto | None
    config: QConfig
    reached: Reached | None
    task: str

    def with_change(
        self, step: NextStep, configure: Configure | None
    ) -> QConfig | None:
        """Return the configuration with the change of a step; None for a change of the data."""
        if not step.expected:
            return None
        if configure is not None:
            return configure(step)
        return changed(self.config, step.options)


def advise(  # noqa: PLR0913
    model: str | Path | ModelProto,
    data: CalibrationData,
    result: Result,
    config: QConfig,
    *,
    task: str = "auto",
    budget: float = BUDGET,
    timed: bool = True,
    progress: bool | None = False,
    ranges: Calibration | str | Path | None = None,
    configure: Configure | None = None,
    isolate: bool = False,
) -> tuple[NextStep, ...]:
    """Try changes of the configuration of a run, and return those that help, best first.

    Each change is a run of its own on the data, judged on the samples that are held out in the same
    places. A change that helps by less than chance is left out.

    Args:
        model: the float model, a path or a ModelProto.
        data: the data of the run, as for ``quantize_static``; it is read again.
        result: the result of the run.
        config: the configuration of the run.
        task: as for ``quantize``.
        budget: time limit in seconds for all trials. A trial that would exceed it is not started.
        timed: whether to measure the latency of the models; not for a target.
        progress: as for ``quantize_static``.
        ranges: the ranges of the run, as for ``quantize``; None to measure them.
        configure: function from a step to the configuration with its change, or None for a change
            of the data; ``changed`` unless given.
        isolate: run onnxruntime in another process, as for ``quantize``.

    Returns:
        Changes with their measured gain, then those that were not tried; the steps of the verdict
        as they are for wrong preprocessing or random data.

    Raises:
        ConfigError: the budget is no positive number.
        DataError: the data does not fit the model.
    """
    check_budget(budget)
    require(timed in (True, False), "timed", timed, "True or False")
    trying = Trying(task, budget, timed, progress, ranges, configure)
    with crash_errors(model), isolated(isolate):
        return advise_report(model, result.model, data, result.report, config, trying)


def advise_report(  # noqa: PLR0913
    model: str | Path | ModelProto,
    quantized: str | Path | ModelProto,
    data: CalibrationData,
    report: Report,
    config: QConfig,
    trying: Trying,
    further: Sequence[NextStep] = (),
) -> tuple[NextStep, ...]:
    """Return changes of a run that help, best first, then untried ones; see ``advise``.

    Args:
        model: the float model.
        quantized: the result of the run.
        data: the data of the run; it is read again.
        report: the report of the run.
        config: the configuration of the run.
        trying: how to try changes.
        further: steps to try besides those that the settings of the run propose.
    """
    verdict = report.verdict
    if verdict is None:
        return ()
    if verdict.band == "unknown" or report.warnings:
        return verdict.next_steps
    float_model = load(model)
    settings = settings_of_config(config, report.samples)
    settings = replace(settings, reached=verdict.sqnr)
    steps = (*next_steps(float_model, settings, verdict.task, most=None), *further)
    reached = Reached.of(report.outputs, verdict)
    run = Baseline(float_model, quantized, config, reached, verdict.task)
    return _advised(run, steps, data, trying)


def advise_refused(
    model: str | Path | ModelProto,
    data: CalibrationData,
    error: AccuracyError,
    config: QConfig,
    trying: Trying,
) -> tuple[NextStep, ...]:
    """Return changes of a run that missed its gate: tried ones that help, then untried ones.

    Args:
        model: the float model.
        data: the data of the run; it is read again.
        error: the error of the run.
        config: the configuration of the run, with the gate as ``min_sqnr``.
        trying: how to try changes.
    """
    verdict = error.verdict
    # Without a verdict there is no measurement, or the data looks wrong.
    if verdict is None:
        return error.next_steps
    float_model = load(model)
    settings = settings_of_config(config, 0)
    steps = next_steps(float_model, settings, verdict.task, most=None)
    kept = [step for step in error.next_steps if not step.options]
    run = Baseline(
        float_model, None, config, Reached.of(error.outputs, verdict), verdict.task
    )
    trying = replace(trying, gate=config.min_sqnr)
    return _advised(run, (*kept, *steps), data, trying)


def advise_file(  # noqa: PLR0913
    model: str | Path | ModelProto,
    quantized: str | Path | ModelProto,
    data: CalibrationData | None,
    verdict: Verdict,
    trying: Trying | None,
    further: Sequence[NextStep] = (),
    *,
    limit: int | None = SAMPLES,
) -> tuple[NextStep, ...]:
    """Return changes for a quantized model from a file: tried ones that help, then untried ones.

    The model is quantized anew on the data with each change. The samples that such a run holds out
    judge the trials and the model in the file.

    Args:
        model: the float model.
        quantized: the quantized model; without the configuration in its metadata nothing is tried.
        data: the data; it is read again.
        verdict: the verdict on the quantized model.
        trying: how to try changes; None to try nothing.
        further: steps to try besides those that the settings of the model propose.
        limit: maximum number of samples to quantize on; None for all.
    """
    float_model, quantized_model = load(model), load(quantized)
    settings = settings_of_model(quantized_model)
    steps = tuple(further)
    if settings is not None:
        settings = replace(settings, reached=verdict.sqnr)
        rules = next_steps(float_model, settings, verdict.task, most=None)
        steps = (*rules, *steps)
    config = None if settings is None else settings.config
    if config is None or trying is None:
        return steps[:MOST]
    run = Baseline(float_model, quantized_model, config, None, verdict.task)
    possible = tuple(step for step in steps if is_possible(config, step.options))
    return _advised(run, possible, data, trying, limit)


def _advised(
    run: Baseline,
    steps: Sequence[NextStep],
    data: CalibrationData | None,
    trying: Trying,
    limit: int | None = None,
) -> tuple[NextStep, ...]:
    """Try changes on the data.

    Args:
        run: the run to improve.
        steps: changes to try, the most promising first.
        data: the data, which is read once.
        trying: how to try them.
        limit: maximum number of samples; None for all.
    """
    if not any(step.expected for step in steps):
        return tuple(steps[:MOST])
    with Spool() as samples:
        graph = Graph.of(inlined(upcast_to_float32(run.model)[0]))
        with data_errors():
            for sample in islice(reader_for(graph, data, run.config), limit):
                samples.append(sample)
        if run.reached is None and not _held_out(run.model, samples):
            return tuple(steps[:MOST])  # nothing could judge
        return tried(run, steps, samples, trying)


def fixes(found: Analysis) -> list[NextStep]:
    """Return fixes of the tensors that add most noise, greatest effect first.

    Tensors with a common fix form a single step.

    Args:
        found: the analysis.
    """
    noise = sum(tensor.added for tensor in found.ranking)
    # The noise that a fix may remove, by the node or tensor that it concerns.
    effects = dict[tuple[str, str], dict[str, float]]()
    for tensor in found.ranking[:_RANKED]:
        for cause in tensor.causes:
            if not cause.options:
                continue
            options = shlex.join(cause.options)
            name = tensor.node or tensor.name
            if cause.options[0] in _OF_SEVERAL:
                # exclusions of several nodes form one step
                options, name = cause.options
            concerned = effects.setdefault((cause.remedy, options), {})
            effect = cause.share * tensor.added
            concerned[name] = concerned.get(name, 0.0) + effect
    steps = list[tuple[float, NextStep]]()
    for (remedy, options), concerned in effects.items():
        names = sorted(concerned, key=lambda name: -concerned[name])
        if options in _OF_SEVERAL:
            names = names[:_EXCLUDED]
            options = shlex.join([options, *names])
        effect = sum(concerned[name] for name in names)
        share = percentage(min(1.0, effect / noise))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        step = NextStep(
            options,
            f"{remedy} (concerns {names[0]}{more})",
            f"quantize(model, data, changed(config, {options!r}))",
            expected=f"an estimated {share} of the noise",
        )
        steps.append((effect, step))
    # Larger effects come first.
    steps.sort(key=lambda pair: -pair[0])
    return [step for _, step in steps]


def tried(
    run: Baseline, steps: Sequence[NextStep], samples: Spool, trying: Trying
) -> tuple[NextStep, ...]:
    """Try changes; return those that help, best first, then the untried ones.

    A change of a run that missed its gate helps if it meets the gate, too.

    Args:
        run: the run to improve.
        steps: changes to try, the most promising first; a step without an expected gain cannot be
            tried, and is kept.
        samples: the data, of which each trial holds samples out.
        trying: how to try them.
    """
    trials = _Trials(run, samples, trying)
    changes = list[tuple[NextStep, QConfig | None]]()
    for step in steps:
        config = run.with_change(step, trying.configure)
        # Two rules may propose the same change.
        if config is None or config not in [known for _, known in changes]:
            changes.append((step, config))
    # What takes long comes last: a trial that the budget ends has brought nothing.
    changes.sort(key=lambda pair: 0.0 if pair[1] is None else relative_cost(pair[1]))
    helpful, untried = list[tuple[Reached, NextStep]](), list[NextStep]()
    with Progress(trying.progress, len(changes), "trying", "change") as bar:
        for count, (step, config) in enumerate(changes, 1):
            outcome = None if config is None else trials.run(config)
            if outcome is None:
                untried.append(step)
            elif outcome.found is not None:
                reached, gain = outcome.found
                helpful.append((reached, replace(step, gain=gain)))
            bar.update(count)
    helpful.sort(key=lambda pair: _rank(*pair))
    best = [step for _, step in helpful[:MOST]]
    finished = len(changes) - len(untried)
    if finished and not best:
        best = [_none_of(finished, trying.gate)]
    return (*best, *untried[: MOST - len(best)])


def _none_of(count: int, gate: float | None) -> NextStep:
    """Return the step that says that no tried change helps."""
    changes = counted(count, "change")
    aim = "helps by more than chance"
    if gate is not None:
        aim = f"meets the gate, or {aim}"
    return NextStep("", f"nothing that was tried ({changes}) {aim}", "")


def _rank(reached: Reached, step: NextStep) -> tuple[bool, int, bool, float]:
    """Return the sort key of a change that helps, best first.

    Those that meet the gate come first. Of changes with the same band, those that cost runtime come
    after the others.
    """
    band = reached.verdict.band
    place = BANDS.index(band) if band in BANDS else len(BANDS)
    gain = step.gain
    misses = gain is None or not gain.meets_gate
    runtime = None if gain is None else gain.runtime
    return misses, place, runtime is not None and runtime > _COSTLY, -reached.sqnr


class _Trials:
    """Runs with changes of one configuration, on the data of the run."""

    def __init__(self, run: Baseline, samples: Spool, trying: Trying) -> None:
        self._run, self._samples, self._trying = run, samples, trying
        self._timed = trying.timed and not run.config.target
        self._runs = Runs(run.model, samples, trying.budget, trying.task, trying.ranges)
        self._seconds = list[float]()
        self._before: Reached | None = None
        self._paired: Paired | None = None

    def run(self, config: QConfig) -> Outcome[tuple[Reached, Gain] | None] | None:
        """Try a configuration; return None if the budget is over before its end.

        The outcome has no gain for a change that does not help.
        """
        # The fastest trial is a lower bound.
        if not self._runs.has_time(min(self._seconds, default=0.0)):
            return None
        outcome = self._runs.run(config.with_(min_sqnr=None), self._judged)
        if outcome is not None:
            self._seconds.append(outcome.seconds)
        return outcome

    def _judged(self, result: Result) -> tuple[Reached, Gain] | None:
        """Return what a trial reaches, with its gain; None if it does not help."""
        found = Reached.of(result.report.outputs, result.report.verdict)
        before = self._reached(result.report.held_out)
        # A model that is float throughout is exact, and no advice.
        if found is None or before is None or not result.report.quantized:
            return None
        gate = self._trying.gate
        gain = before.gain(found, gate)
        helps = before.is_worse_than(found)
        if helps and before.verdict.band == "good":
            helps = self._is_clear(result)
        if not helps and not gain.meets_gate:
            return None
        found = replace(found, latency=self._latency(result.model))
        return found, before.gain(found, gate)

    def _reached(self, held_out: int) -> Reached | None:
        """Return what the run to improve reaches on samples that a trial held out."""
        if self._before is None:
            run, before = self._run, self._run.reached
            if before is None and run.quantized is not None:
                judged = judge_models(
                    run.model,
                    load(run.quantized),
                    _held_out(run.model, self._samples, held_out),
                    task=self._trying.task,
                    preprocessing=False,
                )
                before = Reached.of(judged.outputs, judged.verdict)
            if before is not None:
                latency = self._latency(run.quantized)
                self._before = replace(before, latency=latency)
        return self._before

    def _is_clear(self, result: Result) -> bool:
        """Return whether a gain over a good model is more than chance, sample by sample."""
        run = self._run
        if run.quantized is None or not result.report.held_out:
            return False
        if self._paired is None:
            samples = _held_out(run.model, self._samples, result.report.held_out)
            quantized = load(run.quantized)
            asked = self._trying.task
            self._paired = Paired(run.model, quantized, samples, run.task, asked)
        return self._paired.is_clear_gain(result.model)

    def _latency(self, model: str | Path | ModelProto | None) -> Latency | None:
        """Return the latency of a model and of the float model; None if not wanted or not known."""
        if not self._timed or model is None:
            return None
        try:
            return measure_latency(self._run.model, model, self._samples[0])
        except ModelError:  # judging the accuracy does not need it
            return None


def _held_out(
    model: ModelProto, samples: Spool, most: int | None = None
) -> list[Sample]:
    """Return the samples that a run holds out, in their order.

    Args:
        model: the float model.
        samples: the samples of the run.
        most: their number in the report of a run; None if unknown.
    """
    is_recurrent = bool(states(Graph.of(inlined(model))))
    return held_out_samples(samples, consecutive=is_recurrent, most=most)
