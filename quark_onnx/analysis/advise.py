"""advise: try the changes that a verdict proposes, and return those that help."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeAlias

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
from quark_onnx.engines import selected
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
    Gain,
    MeasuredValue,
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
from quark_onnx.study.study import Study
from quark_onnx.targets.target import is_timed
from quark_onnx.trials.judge import judge_models
from quark_onnx.trials.latency import Latency, measure_latency
from quark_onnx.writing.run_settings import settings_of_config, settings_of_model

#: Options that take the names of several nodes or tensors.
_OPTIONS_OF_NAMES = ("--exclude", "--tensor-calibrator")
#: Greatest number of tensors whose causes propose fixes, and of nodes in an exclusion.
_RANKED_TENSORS, _EXCLUDED_NODES = 10, 3
#: Least gain in dB; a smaller gain may be chance.
_LEAST_GAIN = 0.3
#: Least change of the deciding figure, in units of one sample or one percent; a smaller change may
#: be chance.
_CHANCE_UNITS = 1.5
#: Least ratio of latencies at which a change counts as costing runtime.
_COSTLY_RATIO = 1.25
#: Default budget in seconds, at most; the run itself may take less.
BUDGET = 30.0
#: Default number of samples on which a model from a file is quantized anew.
SAMPLES = 100

#: A function from a step to the configuration with its change.
Configure = Callable[[NextStep], QConfig | None]


@dataclass(frozen=True)
class Performance:
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
    ) -> Performance | None:
        """Return the performance from output errors and a verdict; None without a verdict."""
        if verdict is None:
            return None
        return cls(least_sqnr(list(outputs), np.inf), verdict)

    @property
    def figure(self) -> MeasuredValue | None:
        """Return the figure that decides the band, unless it is the SQNR."""
        deciding = {threshold.figure for threshold in THRESHOLDS[self.verdict.task]}
        for figure in self.verdict.figures:
            if figure.name in deciding and figure.name != "sqnr":
                return figure
        return None

    def gain(self, other: Performance, gate: float | None = None) -> Gain:
        """Return the gain of another model over this model.

        Args:
            other: the performance of the other model.
            gate: minimum SQNR in dB that this model missed; None without one.
        """
        runtime = float_runtime = None
        if self.latency is not None and other.latency is not None:
            # Each model ran in turns with the float model: ratios to it vary less than latencies.
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

    def has_worse_band_than(self, other: Performance) -> bool:
        """Return whether another model has a better band; False where one is unclear."""
        band, other_band = self.verdict.band, other.verdict.band
        if band not in BANDS or other_band not in BANDS:
            return False
        return BANDS.index(other_band) < BANDS.index(band)

    def is_worse_than(self, other: Performance) -> bool:
        """Return whether another model has a better band, or is better by more than chance.

        In the same band, neither the SQNR nor the deciding figure may be worse by more than chance.
        """
        band, other_band = self.verdict.band, other.verdict.band
        if band in BANDS and other_band in BANDS and band != other_band:
            return BANDS.index(other_band) < BANDS.index(band)
        decibels = self.gain(other).decibels
        progress = self._progress(other)
        if decibels >= _LEAST_GAIN:
            return progress >= -_CHANCE_UNITS
        return progress > _CHANCE_UNITS and decibels > -_LEAST_GAIN

    def _progress(self, other: Performance) -> float:
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


def _change(before: MeasuredValue | None, after: MeasuredValue | None) -> str:
    """Return two values of a figure as text; empty if one is missing, or if they are equal."""
    if before is None or after is None or before.value == after.value:
        return ""
    # Shares are percent; divergences and decibels are numbers.
    if before.name in ("agreement", "f1", "equal", "iou"):
        return f"{before.name} {100 * before.value:.1f} -> {100 * after.value:.1f} %"
    return f"{before.name} {before.value:.4g} -> {after.value:.4g}"


@dataclass(frozen=True)
class TrialSettings:
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
        performance: the performance on the samples that the run held out; None for a model from a
            file, which is judged on the samples that the trials hold out.
        task: task of the verdict.
        useful: steps that help by other means than the accuracy.
    """

    model: ModelProto
    quantized: str | Path | ModelProto | None
    config: QConfig
    performance: Performance | None
    task: str
    useful: tuple[NextStep, ...] = ()

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

    Each change is a run of its own on the data, judged on the same held-out samples. A change whose
    gain may be chance is left out.

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
        Changes with their measured gain, then those that were not tried. For wrong preprocessing or
        random data: the untried steps of the verdict.

    Raises:
        ConfigError: the budget is no positive number.
        DataError: the data does not fit the model.
    """
    check_budget(budget)
    require(timed in (True, False), "timed", timed, "True or False")
    trial_settings = TrialSettings(task, budget, timed, progress, ranges, configure)
    with crash_errors(model), isolated(isolate):
        return advise_report(
            model, result.model, data, result.report, config, trial_settings
        )


def advise_report(  # noqa: PLR0913
    model: str | Path | ModelProto,
    quantized: str | Path | ModelProto,
    data: CalibrationData,
    report: Report,
    config: QConfig,
    trial_settings: TrialSettings,
    further: Sequence[NextStep] = (),
    *,
    useful: Sequence[NextStep] = (),
    own: bool = True,
) -> tuple[NextStep, ...]:
    """Return changes of a run that help, best first, then untried ones; see ``advise``.

    Args:
        model: the float model.
        quantized: the result of the run.
        data: the data of the run; it is read again.
        report: the report of the run.
        config: the configuration of the run.
        trial_settings: how to try changes.
        further: steps to try besides those that the settings of the run propose.
        useful: steps that help by other means, and are left out only where the band gets worse.
        own: whether to try the steps that the settings of the run propose.
    """
    verdict = report.verdict
    if verdict is None:
        return ()
    if verdict.band == "unknown" or report.warnings:
        return verdict.next_steps
    float_model = load(model)
    settings = settings_of_config(config, report.samples)
    settings = replace(settings, reached=verdict.sqnr)
    steps = (*useful, *further)
    if own:
        steps = (*next_steps(float_model, settings, verdict.task, most=None), *steps)
    performance = Performance.of(report.outputs, verdict)
    baseline = Baseline(
        float_model, quantized, config, performance, verdict.task, tuple(useful)
    )
    return _try_on_data(baseline, steps, data, trial_settings)


def advise_refused(
    model: str | Path | ModelProto,
    data: CalibrationData,
    error: AccuracyError,
    config: QConfig,
    trial_settings: TrialSettings,
) -> tuple[NextStep, ...]:
    """Return changes for a run that missed its gate: first helpful ones, then untried ones.

    Args:
        model: the float model.
        data: the data of the run; it is read again.
        error: the error of the run.
        config: the configuration of the run, with the gate as ``min_sqnr``.
        trial_settings: how to try changes.
    """
    verdict = error.verdict
    # Without a verdict, nothing was measured, or the data looks wrong.
    if verdict is None:
        return error.next_steps
    float_model = load(model)
    settings = settings_of_config(config, 0)
    steps = next_steps(float_model, settings, verdict.task, most=None)
    kept = [step for step in error.next_steps if not step.options]
    performance = Performance.of(error.outputs, verdict)
    baseline = Baseline(float_model, None, config, performance, verdict.task)
    trial_settings = replace(trial_settings, gate=config.min_sqnr)
    return _try_on_data(baseline, (*kept, *steps), data, trial_settings)


def advise_file(  # noqa: PLR0913
    model: str | Path | ModelProto,
    quantized: str | Path | ModelProto,
    data: CalibrationData | None,
    verdict: Verdict,
    trial_settings: TrialSettings | None,
    further: Sequence[NextStep] = (),
    *,
    limit: int | None = SAMPLES,
) -> tuple[NextStep, ...]:
    """Return changes for a quantized model from a file: tried changes that help, then others.

    The model is quantized anew on the data with each change. The samples that such a run holds out
    judge the trials and the model in the file.

    Args:
        model: the float model.
        quantized: the quantized model; without the configuration in its metadata nothing is tried.
        data: the data; it is read again.
        verdict: the verdict on the quantized model.
        trial_settings: how to try changes; None to try nothing.
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
    if config is None or trial_settings is None:
        return steps[:MOST]
    baseline = Baseline(float_model, quantized_model, config, None, verdict.task)
    possible = tuple(step for step in steps if is_possible(config, step.options))
    return _try_on_data(baseline, possible, data, trial_settings, limit)


def _try_on_data(
    baseline: Baseline,
    steps: Sequence[NextStep],
    data: CalibrationData | None,
    trial_settings: TrialSettings,
    limit: int | None = None,
) -> tuple[NextStep, ...]:
    """Read the data and try changes on it.

    Args:
        baseline: the run to improve.
        steps: changes to try, the most promising first.
        data: the data, which is read once.
        trial_settings: how to try them.
        limit: maximum number of samples; None for all.
    """
    if not any(step.expected for step in steps):
        return tuple(steps[:MOST])
    with Spool() as samples:
        graph = Graph.of(inlined(upcast_to_float32(baseline.model)[0]))
        with data_errors():
            for sample in islice(reader_for(graph, data, baseline.config), limit):
                samples.append(sample)
        # Without held-out samples, trials and a model from a file cannot be judged.
        if baseline.performance is None and not _held_out(baseline.model, samples):
            return tuple(steps[:MOST])
        return try_changes(baseline, steps, samples, trial_settings)


def try_changes(
    baseline: Baseline,
    steps: Sequence[NextStep],
    samples: Spool,
    trial_settings: TrialSettings,
) -> tuple[NextStep, ...]:
    """Try changes; return the changes that help, best first, then the untried changes.

    If the run missed its gate, a change that meets the gate also helps.

    Args:
        baseline: the run to improve.
        steps: changes to try, the most promising first; a step without an expected gain cannot be
            tried, and is kept.
        samples: the data, of which each trial holds samples out.
        trial_settings: how to try them.
    """
    trials = _Trials(baseline, samples, trial_settings)
    changes, untried = list[tuple[NextStep, QConfig]](), list[NextStep]()
    for step in steps:
        config = baseline.with_change(step, trial_settings.configure)
        if config is None:
            untried.append(step)
        # Two rules may propose the same change.
        elif config not in [known for _, known in changes]:
            changes.append((step, config))
    # Cheap changes first: the time of a trial that the budget ends is lost.
    changes.sort(
        key=lambda pair: (pair[0] not in baseline.useful, relative_cost(pair[1]))
    )
    study = Study[int, _Outcome](
        lambda index: trials.run(*changes[index]),
        key=lambda index: index,
        fits=lambda _, finished: trials.fits([outcome for _, outcome in finished]),
    )
    helpful = list[tuple[Performance, NextStep]]()
    with Progress(trial_settings.progress, len(changes), "trying", "change") as bar:
        for index, outcome in study.run(range(len(changes))):
            if outcome.found is not None:
                performance, gain = outcome.found
                helpful.append((performance, replace(changes[index][0], gain=gain)))
            bar.update(index + 1)
    untried += [changes[index][0] for index in study.untried]
    untried.sort(key=lambda step: step not in baseline.useful)
    helpful.sort(key=lambda pair: _rank(*pair))
    best = [step for _, step in helpful[:MOST]]
    finished = len(study.finished())
    if finished and not best:
        best = [_none_helps(finished, trial_settings.gate)]
    return (*best, *untried[: MOST - len(best)])


def _none_helps(count: int, gate: float | None) -> NextStep:
    """Return the step that says that no tried change helps."""
    changes = counted(count, "change")
    aim = "helps by more than chance"
    if gate is not None:
        aim = f"meets the gate, or {aim}"
    return NextStep("", f"nothing that was tried ({changes}) {aim}", "")


def _rank(performance: Performance, step: NextStep) -> tuple[bool, int, bool, float]:
    """Return the sort key of a change that helps, best first.

    The key compares in order: whether the gate is missed, the band, whether the change costs
    runtime, and the SQNR.
    """
    band = performance.verdict.band
    band_index = BANDS.index(band) if band in BANDS else len(BANDS)
    gain = step.gain
    misses_gate = gain is None or not gain.meets_gate
    runtime = None if gain is None else gain.runtime
    is_costly = runtime is not None and runtime > _COSTLY_RATIO
    return misses_gate, band_index, is_costly, -performance.sqnr


#: A trial that helps has a performance and a gain.
_Outcome: TypeAlias = Outcome[tuple[Performance, Gain] | None]


class _Trials:
    """Runs with changes of one configuration, on the data of the run."""

    def __init__(
        self, baseline: Baseline, samples: Spool, trial_settings: TrialSettings
    ) -> None:
        self._baseline, self._samples = baseline, samples
        self._trial_settings = trial_settings
        # The latency on a target is that of its engine alone.
        known = selected() is not None or is_timed(baseline.config.target)
        self._timed = trial_settings.timed and known
        self._runs = Runs(
            baseline.model,
            samples,
            trial_settings.budget,
            trial_settings.task,
            trial_settings.ranges,
        )
        self._before: Performance | None = None
        self._paired: Paired | None = None

    def fits(self, finished: Sequence[_Outcome]) -> bool:
        """Return whether there is time for another trial."""
        # The fastest trial is a lower bound.
        return self._runs.has_time(min((run.seconds for run in finished), default=0.0))

    def run(self, step: NextStep, config: QConfig) -> _Outcome | None:
        """Try a step; None if the budget is over before the trial ends.

        The outcome has found None if the change does not help.
        """
        is_useful = step in self._baseline.useful
        judge = partial(self._judge_trial, is_useful=is_useful)
        return self._runs.run(config.with_(min_sqnr=None), judge)

    def _judge_trial(
        self, result: Result, *, is_useful: bool
    ) -> tuple[Performance, Gain] | None:
        """Return the performance of a trial and its gain; None if the change does not help."""
        performance = Performance.of(result.report.outputs, result.report.verdict)
        before = self._judge_baseline(result.report.held_out)
        # To leave the whole model float is exact, and no advice.
        if performance is None or before is None or not result.report.quantized:
            return None
        gate = self._trial_settings.gate
        gain = before.gain(performance, gate)
        helps = before.is_worse_than(performance)
        if helps and before.verdict.band == "good":
            helps = self._is_clear(result)
        if is_useful:
            helps = not performance.has_worse_band_than(before)
        if not helps and not gain.meets_gate:
            return None
        performance = replace(performance, latency=self._latency(result.model))
        return performance, before.gain(performance, gate)

    def _judge_baseline(self, held_out: int) -> Performance | None:
        """Return the performance of the run to improve, on as many held-out samples as a trial."""
        if self._before is not None:
            return self._before
        baseline = self._baseline
        before = baseline.performance
        if before is None and baseline.quantized is not None:
            judged = judge_models(
                baseline.model,
                load(baseline.quantized),
                _held_out(baseline.model, self._samples, held_out),
                task=self._trial_settings.task,
                preprocessing=False,
            )
            before = Performance.of(judged.outputs, judged.verdict)
        if before is not None:
            latency = self._latency(baseline.quantized)
            self._before = replace(before, latency=latency)
        return self._before

    def _is_clear(self, result: Result) -> bool:
        """Return whether a gain over a good model is more than chance, sample by sample."""
        baseline = self._baseline
        if baseline.quantized is None or not result.report.held_out:
            return False
        if self._paired is None:
            self._paired = Paired(
                baseline.model,
                load(baseline.quantized),
                _held_out(baseline.model, self._samples, result.report.held_out),
                baseline.task,
                self._trial_settings.task,
            )
        return self._paired.is_clear_gain(result.model)

    def _latency(self, model: str | Path | ModelProto | None) -> Latency | None:
        """Return the latency of a model and of the float model; None if not wanted or not known."""
        if not self._timed or model is None:
            return None
        try:
            return measure_latency(self._baseline.model, model, self._samples[0])
        except ModelError:  # judging the accuracy does not need it
            return None


def _held_out(
    model: ModelProto, samples: Spool, most: int | None = None
) -> list[Sample]:
    """Return the held-out samples in order; ``most``: their number in the report, if known."""
    is_recurrent = bool(states(Graph.of(inlined(model))))
    return held_out_samples(samples, consecutive=is_recurrent, most=most)


def fixes(analysis: Analysis) -> list[NextStep]:
    """Return fixes of the tensors that add most noise, greatest effect first.

    Tensors with a common fix form a single step.

    Args:
        analysis: the analysis of a quantized model.
    """
    noise = sum(tensor.added for tensor in analysis.ranking)
    # For each fix, a remedy and its options: the noise that it may remove, by node or tensor.
    effects = dict[tuple[str, str], dict[str, float]]()
    for tensor in analysis.ranking[:_RANKED_TENSORS]:
        for cause in tensor.causes:
            if not cause.options:
                continue
            options = shlex.join(cause.options)
            name = tensor.node or tensor.name
            # One step for all names of such an option, so that the name is no part of the key.
            if cause.options[0] in _OPTIONS_OF_NAMES:
                options, name = cause.options
            concerned = effects.setdefault((cause.remedy, options), {})
            effect = cause.share * tensor.added
            concerned[name] = concerned.get(name, 0.0) + effect
    steps = list[tuple[float, NextStep]]()
    for (remedy, options), concerned in effects.items():
        names = sorted(concerned, key=lambda name: -concerned[name])
        if options in _OPTIONS_OF_NAMES:
            names = names[:_EXCLUDED_NODES]
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
    steps.sort(key=lambda pair: -pair[0])
    return [step for _, step in steps]
