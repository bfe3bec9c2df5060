"""advise: try the changes that a verdict proposes, and return those that help."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from onnx import ModelProto

from calibrators.onnx_runtime.isolation import isolated
from calibrators.readers.open import CalibrationData
from calibrators.readers.spool import Spool
from quark_onnx.analysis.result import Analysis
from quark_onnx.check.inlined import inlined
from quark_onnx.common.errors import (
    DataError,
    ModelError,
    crash_errors,
    data_errors,
)
from quark_onnx.common.progress import Progress
from quark_onnx.config import QConfig
from quark_onnx.config.checks import require
from quark_onnx.files.io import load
from quark_onnx.graph import Graph
from quark_onnx.job import Result
from quark_onnx.measuring.calibration import Calibration
from quark_onnx.measuring.open_data import reader_for
from quark_onnx.report import percentage
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
from quark_onnx.search.checks import check_budget
from quark_onnx.search.runs import Outcome, Runs, SplitData
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

    def gain(self, other: Reached) -> Gain:
        """Return the gain of another model over this one."""
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
class Baseline:
    """A run to improve.

    Attributes:
        model: the float model.
        quantized: the quantized model.
        config: the configuration of the run.
        reached: what the quantized model reaches on the samples that are held out.
        task: task of the model, as for ``quantize``.
        ranges: earlier ranges of the run; None to measure them.
        configure: as for ``advise``.
        judges: samples that judge the trials; None for those that each run holds out.
    """

    model: str | Path | ModelProto
    quantized: str | Path | ModelProto
    config: QConfig
    reached: Reached
    task: str = "auto"
    ranges: Calibration | str | Path | None = None
    configure: Configure | None = None
    judges: Spool | None = None

    def with_change(self, step: NextStep) -> QConfig | None:
        """Return the configuration with the change of a step; None for a change of the data."""
        if not step.expected:
            return None
        if self.configure is not None:
            return self.configure(step)
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
    report = result.report
    judged = Reached.of(report.outputs, report.verdict)
    if judged is None or judged.verdict.band == "unknown" or report.warnings:
        return () if judged is None else judged.verdict.next_steps
    with crash_errors(model), isolated(isolate), Spool() as samples:
        float_model = load(model)
        steps = next_steps(
            float_model,
            settings_of_config(config, report.samples),
            judged.verdict.task,
            most=None,
        )
        run = Baseline(model, result.model, config, judged, task, ranges, configure)
        if not any(step.expected for step in steps):
            return steps
        reader = reader_for(Graph.of(inlined(float_model)), data, config)
        with data_errors():
            for sample in reader:
                samples.append(sample)
        return tried(run, steps, samples, budget, timed=timed, progress=progress)


def advise_analysis(  # noqa: PLR0913
    model: str | Path | ModelProto,
    quantized: ModelProto,
    found: Analysis,
    samples: Spool,
    *,
    task: str = "auto",
    budget: float | None = None,
    progress: bool | None = False,
) -> tuple[NextStep, ...]:
    """Return changes for an analyzed model: tried ones that help, then untried ones.

    Args:
        model: the float model.
        quantized: the quantized model; without the configuration in its metadata nothing is tried.
        found: the analysis, with a risky or poor verdict.
        samples: the samples of the analysis.
        task: as for ``quantize``.
        budget: time limit in seconds for all trials; None to try nothing.
        progress: as for ``quantize_static``.
    """
    assert found.verdict is not None
    settings = settings_of_model(quantized)
    steps = fixes(found)
    float_model = load(model)
    if settings is not None:
        rules = next_steps(float_model, settings, found.verdict.task, most=None)
        steps = [*rules, *steps]
    config = None if settings is None else settings.config
    if config is None or budget is None:
        return tuple(steps[:MOST])
    possible = [step for step in steps if is_possible(config, step.options)]
    split = SplitData()
    try:
        split.read(samples, len(samples), most=len(samples))
        judged = judge_models(
            float_model, quantized, split.judges, task=task, preprocessing=False
        )
        before = Reached.of(judged.outputs, judged.verdict)
        if before is None:
            return tuple(steps[:MOST])
        run = Baseline(model, quantized, config, before, task, judges=split.judges)
        return tried(run, possible, split.calibration, budget, progress=progress)
    except DataError:  # a single sample cannot be held out
        return tuple(steps[:MOST])
    finally:
        split.close()


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


def tried(  # noqa: PLR0913
    run: Baseline,
    steps: Sequence[NextStep],
    samples: Spool,
    budget: float,
    *,
    timed: bool = True,
    progress: bool | None = False,
) -> tuple[NextStep, ...]:
    """Try changes; return those that help, best first, then the untried ones.

    Args:
        run: the run to improve.
        steps: changes to try, the most promising first; a step without an expected gain cannot be
            tried, and is kept.
        samples: the data, of which each trial holds samples out.
        budget: time limit in seconds.
        timed: whether to measure the latency of the models.
        progress: as for ``quantize_static``.
    """
    trials = _Trials(run, samples, budget, timed=timed and not run.config.target)
    changes = [(step, run.with_change(step)) for step in steps]
    # What takes long comes last: a trial that the budget ends has brought nothing.
    changes.sort(key=lambda pair: 0.0 if pair[1] is None else relative_cost(pair[1]))
    done, untried = list[tuple[Reached, NextStep]](), list[NextStep]()
    with Progress(progress, len(changes), "trying", "change") as bar:
        for count, (step, config) in enumerate(changes, 1):
            outcome = None if config is None else trials.run(config)
            found = None if outcome is None else outcome.found
            if outcome is None:
                untried.append(step)
            elif found is not None and trials.before.is_worse_than(found):
                gain = trials.before.gain(found)
                done.append((found, replace(step, gain=gain)))
            bar.update(count)
    done.sort(key=lambda pair: _rank(*pair))
    best = [step for _, step in done[:MOST]]
    return (*best, *untried[: MOST - len(best)])


def _rank(reached: Reached, step: NextStep) -> tuple[int, bool, float]:
    """Return the sort key of a change that helps, best first.

    Of changes with the same band, those that cost runtime come after the others.
    """
    band = reached.verdict.band
    place = BANDS.index(band) if band in BANDS else len(BANDS)
    runtime = None if step.gain is None else step.gain.runtime
    return place, runtime is not None and runtime > _COSTLY, -reached.sqnr


class _Trials:
    """Runs with changes of one configuration, on the data of the run."""

    def __init__(
        self, run: Baseline, samples: Spool, budget: float, *, timed: bool
    ) -> None:
        self._run, self._samples, self._timed = run, samples, timed
        self._runs = Runs(run.model, samples, budget, run.task, run.ranges)
        self._seconds = list[float]()
        self.before = replace(run.reached, latency=self._latency(run.quantized))

    def run(self, config: QConfig) -> Outcome[Reached | None] | None:
        """Try a configuration; return None if the budget is over before its end."""
        # The fastest trial is a lower bound.
        if not self._runs.has_time(min(self._seconds, default=0.0)):
            return None
        outcome = self._runs.run(config.with_(min_sqnr=None), self._judged)
        if outcome is not None:
            self._seconds.append(outcome.seconds)
        return outcome

    def _judged(self, result: Result) -> Reached | None:
        outputs, verdict = result.report.outputs, result.report.verdict
        if self._run.judges is not None:
            judged = judge_models(
                self._float_model,
                result.model,
                self._run.judges,
                task=self._run.task,
                preprocessing=False,
            )
            outputs, verdict = judged.outputs, judged.verdict
        found = Reached.of(outputs, verdict)
        if found is None:
            return None
        return replace(found, latency=self._latency(result.model))

    @cached_property
    def _float_model(self) -> ModelProto:
        return load(self._run.model)

    def _latency(self, model: str | Path | ModelProto) -> Latency | None:
        """Return the latency of a model and of the float model; None if not wanted or not known."""
        if not self._timed:
            return None
        try:
            return measure_latency(self._run.model, model, self._samples[0])
        except ModelError:  # judging the accuracy does not need it
            return None
