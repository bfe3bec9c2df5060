"""quantize_to_accuracy: the cheapest configuration that reaches a given accuracy."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite, isnan
from pathlib import Path
from typing import Any

from onnx import ModelProto

from calibrators.base import is_number
from calibrators.onnx_runtime.isolation import isolated
from calibrators.readers.open import CalibrationData
from quark_onnx.analysis.compare import Comparison, compare
from quark_onnx.check.inlined import inlined
from quark_onnx.common.errors import (
    ConfigError,
    ModelError,
    crash_errors,
)
from quark_onnx.common.progress import Progress, Show, showing
from quark_onnx.common.registry import RECIPES
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig, to_dict
from quark_onnx.files.io import load, staged
from quark_onnx.files.overwrites import refuse_overwritten_arguments
from quark_onnx.graph import Graph
from quark_onnx.job import Result
from quark_onnx.measuring.open_data import reader_for
from quark_onnx.optimizers import AutoMixedPrecision
from quark_onnx.page.blocks import Block, Facts, Judgement, Reasons, Strong, TitledTable
from quark_onnx.page.reported import Reported
from quark_onnx.planning.nothing_to_quantize import require_something_to_quantize
from quark_onnx.recipes import Choice, choose
from quark_onnx.report import Report, decibels
from quark_onnx.report.verdict import Verdict
from quark_onnx.search.checks import check_budget
from quark_onnx.search.runs import EVERY, Runs, SplitData
from quark_onnx.search.space import ConfigCombination
from quark_onnx.study.study import Study
from quark_onnx.writing.destination import destination, keeps_weights_beside

logger = logging.getLogger(__name__)

#: The greatest number of samples that judge.
_AT_MOST = 256
#: Maximum share of float nodes before 16 bits are tried.
_FLOAT_SHARE = 0.25
#: Figures of verdicts that are shares, with a loss in percent.
#: The other figures (divergence in nats, PSNR and SQNR in dB) have no upper end from which a loss
#: could be counted.
_SHARES = frozenset({"agreement", "f1", "cosine", "equal"})
_TARGET = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(%|dB)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class AccuracyTarget:
    """The accuracy that a quantized model must keep.

    Attributes:
        value: permitted loss in percent, or minimum SQNR of every output in dB.
        percent: True for a loss in percent, False for dB.
    """

    value: float
    percent: bool

    @classmethod
    def of(cls, text: object) -> AccuracyTarget:
        """Parse a target, such as ``"1%"`` or ``"25dB"``; a number is dB.

        Args:
            text: the target.

        Returns:
            The target.

        Raises:
            ConfigError: the text is no target.

        >>> AccuracyTarget.of("0.5 %"), AccuracyTarget.of(25)
        (AccuracyTarget(value=0.5, percent=True), AccuracyTarget(value=25.0, percent=False))
        """
        # A bool is no number here: AccuracyTarget.of(True) is an error, and not 1 dB.
        # NaN and infinity are numbers, too, which no model could meet or miss.
        if is_number(text) and isfinite(text):  # type: ignore[arg-type]
            return cls(float(text), False)  # type: ignore[arg-type]
        match = _TARGET.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ConfigError(
                f"accuracy is {text!r}; it must be a loss such as 1%, or a least SQNR"
                " such as 25dB",
            )
        return cls(float(match[1]), match[2] == "%")

    def __str__(self) -> str:
        if self.percent:
            return f"a loss of at most {self.value:g} %"
        return f"{self.value:g} dB at every output"


@dataclass(frozen=True)
class Attempt:
    """A tried configuration with its result.

    Attributes:
        name: preset, recipe and optimizers.
        config: the configuration.
        sqnr: SQNR of the worst output on the held-out samples, in dB; None if the attempt failed.
        loss: loss of the verdict's first figure in percent; None if the figure is no share.
        figure: sentence of the verdict.
        seconds: runtime of quantization and evaluation.
        met: True if the model keeps the accuracy.
        error: reason of the failure; empty without a failure.
    """

    name: str
    config: QConfig
    sqnr: float | None
    loss: float | None
    figure: str
    seconds: float
    met: bool
    error: str = ""


@dataclass(frozen=True, repr=False)
class AccuracyResult(Reported):
    """Result of ``quantize_to_accuracy``.

    Attributes:
        target: the requested accuracy.
        attempts: the attempts in their order.
        left: names of configurations that did not fit into the budget.
        best: the attempt that was written: the first that met the target, otherwise the closest.
        result: model and report of the best attempt.
        judged: number of held-out samples, which are not used for calibration.
        choice: the recipe, and the reason for it.
    """

    target: AccuracyTarget
    attempts: tuple[Attempt, ...]
    left: tuple[str, ...]
    best: Attempt
    result: Result
    judged: int
    choice: Choice

    @property
    def reached(self) -> bool:
        """Return True if the target was met."""
        return self.best.met

    @property
    def resolution(self) -> float:
        """Return the least loss in percent that the held-out samples can resolve."""
        return 100.0 / self.judged

    @property
    def report(self) -> Report:
        """Return the report of the best attempt, without advice to change its configuration."""
        report = self.result.report
        if report.verdict is None:
            return report
        return replace(report, verdict=replace(report.verdict, next_steps=()))

    def blocks(self) -> list[Block]:
        """Return the attempts and the report of the best as blocks."""
        outcome = f"{self.best.name} meets the target, {self.target}"
        if not self.reached:
            outcome = (
                f"no configuration meets the target, {self.target}; {self.best.name} comes"
                " closest"
            )
        facts = [
            ("Target", str(self.target), "met" if self.reached else "missed"),
            ("Judged on", f"{self.judged}", "samples, which calibrate nothing"),
            ("Recipe", self.choice.recipe.name, self.choice.reason),
        ]
        samples = f"{self.judged} judge, and calibrate nothing"
        # 64 samples cannot tell a loss of 1 % from none: a single sample is 1.6 %.
        if self.target.percent and self.resolution > self.target.value:
            samples += f"; they resolve losses of {self.resolution:.2g} % at best"
        lines = {
            "target": [str(self.target)],
            "samples": [samples],
            "recipe": [f"{self.choice.recipe.name}: {self.choice.reason}"],
        }
        rows = [
            (
                Strong(attempt.name) if attempt is self.best else attempt.name,
                "" if attempt.sqnr is None else decibels(attempt.sqnr),
                "" if attempt.loss is None else f"{attempt.loss:.2f}",
                f"{attempt.seconds:.1f}",
                "failed" if attempt.error else "met" if attempt.met else "missed",
                attempt.error or attempt.figure,
            )
            for attempt in self.attempts
        ]
        header = (
            "configuration",
            "SQNR, dB",
            "loss, %",
            "seconds",
            "target",
            "verdict",
        )
        tried = counted(len(self.attempts), "configuration")
        attempts = TitledTable(
            "Attempts", header, rows, f"{tried}, in this order", "tried"
        )
        untried = dict.fromkeys(self.left, "did not fit into --budget")
        judgement, *details = self.report.blocks()
        if isinstance(judgement, Judgement):
            judgement = replace(judgement, details=(outcome,))
        return [
            judgement,
            Facts(facts, lines),
            attempts.without_empty_columns(),
            Reasons(
                "Not tried", untried, "configuration", "configurations", "not tried"
            ),
            Facts(
                (), {"config": [self.best.name, *str(self.best.config).splitlines()]}
            ),
            *details,
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {
            "target": {"value": self.target.value, "percent": self.target.percent},
            "reached": self.reached,
            "judged": self.judged,
            "recipe": self.choice.recipe.name,
            "left": list(self.left),
            "best": self.best.name,
            "attempts": [
                {**vars(attempt), "config": to_dict(attempt.config)}
                for attempt in self.attempts
            ],
        }


def quantize_to_accuracy(  # noqa: PLR0913
    model: str | Path | ModelProto,
    data: CalibrationData | None,
    accuracy: str | float,
    output: str | Path | None = None,
    *,
    recipe: str = "auto",
    task: str = "auto",
    budget: float | None = None,
    progress: Show = False,
    isolate: bool = False,
) -> AccuracyResult:
    """Try configurations, fastest models first, until a model is accurate enough.

    8-bit integers come first: plain, by the recipe for the kind of model, with bias correction, and
    with learned codes. For a target in dB, models with some float nodes come next. 16-bit
    activations and weight-only quantization come last. With a budget, configurations that learn or
    search are tried after the others, and replace a slower model that is accurate enough.

    Args:
        model: the float model, a path or a ModelProto.
        data: calibration data, as for ``quantize_static``. A quarter of the samples is held out of
            calibration to evaluate the models.
        accuracy: ``"1%"`` limits the loss of agreement with the float model, in the terms of the
            task; ``"25dB"`` is the minimum SQNR of every output.
        output: path where the model is written, or the closest model if none is accurate enough.
        recipe: kind of model; "auto" to choose by structure.
        task: as for ``quantize``.
        budget: time limit in seconds. A configuration that would exceed the limit is not started,
            and a running one is stopped at the limit. The first one always finishes.
        progress: as for ``quantize_static``.
        isolate: run onnxruntime in another process, as for ``quantize``. A configuration that
            crashes it has failed, and the next one is tried.

    Returns:
        The attempts and the best model.

    Raises:
        ConfigError: a setting is wrong, or a loss in percent is undefined for the task.
        DataError: the data does not fit the model, or there are fewer than two samples.
        ModelError: every configuration failed.
    """
    target = AccuracyTarget.of(accuracy)
    check_budget(budget)
    # Before the attempts, which may take hours.
    refuse_overwritten_arguments({"model": model, "data": data}, {"output": output})
    target_file = destination(model, output)
    with crash_errors(model), isolated(isolate), showing(progress) as show:
        return _climbed(model, data, target, target_file, recipe, task, budget, show)


def _climbed(  # noqa: PLR0913  the checked arguments of quantize_to_accuracy
    model: str | Path | ModelProto,
    data: CalibrationData | None,
    target: AccuracyTarget,
    target_file: Path | None,
    recipe: str,
    task: str,
    budget: float | None,
    progress: bool | None,
) -> AccuracyResult:
    """Try configurations until a model reaches the target, and write it."""
    choice = choose(model)
    if recipe != "auto":
        row = RECIPES[recipe]
        # The automatic choice above also rejects a model that cannot be loaded, before samples are
        # read.
        choice = Choice(row, row.config, "as asked for")
    samples = SplitData()
    try:
        graph = Graph.of(inlined(load(model)))
        require_something_to_quantize(graph, QConfig())
        reader = reader_for(graph, data)
        samples.read(reader, reader.length, most=_AT_MOST, progress=progress)
        judges = len(samples.judges)
        if target.percent and 0 < target.value < 100.0 / judges:
            # Before the work: its verdict may depend on a single sample.
            logger.warning(
                "%s judge, so that one of them is a loss of %.2g %%; for a loss of %g %% give"
                " at least %d samples",
                counted(judges, "sample"),
                100.0 / judges,
                target.value,
                ceil(100.0 * EVERY / target.value),
            )
        result = _Ladder(model, samples, target, task, budget).climb(choice, progress)
    finally:
        samples.close()
    if target_file is not None:
        # The output has its weights in a file of their own if the input model has.
        beside = keeps_weights_beside(model, target_file)
        with staged(result.result.model, target_file, external=beside):
            pass  # the result was checked and run when it was created
    return result


def steps_of(choice: Choice, target: AccuracyTarget) -> Iterator[tuple[str, QConfig]]:
    """Yield configurations with their names, in the order of model runtime.

    Mixed precision chooses float nodes by SQNR, and applies to targets in dB alone.

    Args:
        choice: the recipe for the model.
        target: the requested accuracy.
    """
    plain = QConfig.of("A8W8")
    corrected = ("bias_correction",)
    learned = ("cle", "adaquant", "bias_correction")
    wide = QConfig.of("A16W8")
    some_float = AutoMixedPrecision(
        target=target.value,
        to="float",
        share=_FLOAT_SHARE,
    )
    mixed = plain.with_(optimizers=(some_float, *corrected))
    # A recipe may equal one of the other configurations.
    tried = list[QConfig]()
    for name, config in (
        ("A8W8", plain),
        (f"recipe {choice.recipe.name}", choice.config),
        ("A8W8 bias_correction", plain.with_(optimizers=corrected)),
        (f"A8W8 {'+'.join(learned)}", plain.with_(optimizers=learned)),
        ("A8W8, some nodes float", None if target.percent else mixed),
        ("A16W8", wide),
        ("A16W8 bias_correction", wide.with_(optimizers=corrected)),
        ("W8", QConfig.of("W8")),
    ):
        if config is not None and config not in tried:
            tried.append(config)
            yield name, config


def _takes_long(config: QConfig) -> bool:
    """Return whether optimizers learn codes, or search formats of nodes."""
    return any(
        optimizer.stage in ("layer", "plan") and optimizer.name != "bias_correction"
        for optimizer in config.optimizers
    )


#: A configuration with its attempt.
_Tried = tuple[ConfigCombination, Attempt]


class _Ladder:
    def __init__(
        self,
        model: str | Path | ModelProto,
        samples: SplitData,
        target: AccuracyTarget,
        task: str,
        budget: float | None,
    ) -> None:
        self._model, self._judges = model, samples.judges
        self._target, self._task = target, task
        self._runs = Runs(model, samples.calibration, budget, task)
        # The shortfall to the target (0 if met) and the rank, the attempt and its model: one model
        # stays in memory.
        self._best: tuple[tuple[float, int], Attempt, Result] | None = None
        # Places of the configurations in the order of model runtime.
        self._ranks = dict[str, int]()
        self._study = Study(self._attempt, fits=self._fits)

    def climb(self, choice: Choice, progress: bool | None) -> AccuracyResult:
        """Try configurations in order until a model meets the target.

        Args:
            choice: recipe for the model, of which the configuration is one of the steps.
            progress: whether to show a progress bar; None shows it if stderr is a terminal.

        Returns:
            The attempts, the configurations that were left out, and the best model.

        Raises:
            ModelError: every configuration failed.
            ConfigError: the target is in percent, and the outputs have no share that agrees.
        """
        steps = [
            ConfigCombination(name, config, {})
            for name, config in steps_of(choice, self._target)
        ]
        self._ranks = {step.key: rank for rank, step in enumerate(steps)}
        if self._runs.is_limited:
            # Configurations that learn or search would leave no time for 16 bits, which need less.
            steps.sort(key=lambda step: _takes_long(step.config))
        with Progress(progress, len(steps), "trying", "configuration") as bar:
            for done, _ in enumerate(self._study.run(self._useful(steps)), 1):
                bar.update(done)
        # The first attempt has no time limit, so that attempts is not empty here.
        attempts = [attempt for _, attempt in self._study.finished()]
        if self._best is None:
            first = attempts[0]
            raise ModelError(
                f"every configuration failed; {first.name}: {first.error}",
            )
        _, best, result = self._best
        return AccuracyResult(
            self._target,
            tuple(attempts),
            tuple(self._left()),
            best,
            result,
            len(self._judges),
            choice,
        )

    def _left(self) -> list[str]:
        """Return the names of the configurations that were left out, in the order of runtime."""
        untried = zip(self._study.untried, self._study.untried_names, strict=True)
        return [
            name
            for _, name in sorted(
                (self._ranks[step.key], name) for step, name in untried
            )
        ]

    def _useful(self, steps: list[ConfigCombination]) -> Iterator[ConfigCombination]:
        """Yield configurations until none is left that could give a faster model."""
        for step in steps:
            if self._ranks[step.key] < self._met_by:
                yield step

    @property
    def _met_by(self) -> float:
        """The rank of the best attempt if it meets the target; infinity otherwise."""
        if self._best is None or not self._best[1].met:
            return inf
        return self._best[0][1]

    def _fits(self, _: ConfigCombination, tried: list[_Tried]) -> bool:
        """Return whether a configuration may end within the budget; the first one always runs."""
        # The fastest is a lower bound: later configurations do more.
        return not tried or self._runs.has_time(
            min(attempt.seconds for _, attempt in tried)
        )

    def _attempt(self, step: ConfigCombination) -> Attempt | None:
        """Quantize and evaluate a configuration; return None if the budget ran out."""
        name, config = step.name, step.config

        def judged(result: Result) -> tuple[Result, Comparison]:
            found = compare(self._model, result.model, self._judges, task=self._task)
            return result, found

        # The first attempt has no time limit.
        outcome = self._runs.run(config, judged, limited=bool(self._study.finished()))
        if outcome is None:
            return None
        if outcome.found is None:
            seconds, error = outcome.seconds, outcome.error
            return Attempt(name, config, None, None, "", seconds, False, error)
        result, found = outcome.found
        loss = self._loss(found)
        if self._target.percent:
            # _loss raises for a target in percent without a share.
            assert loss is not None
            # Both shortfalls fall with accuracy; 0 meets the target.
            shortfall = loss - self._target.value
        else:
            shortfall = self._target.value - found.sqnr
        attempt = Attempt(
            name,
            config,
            found.sqnr,
            loss,
            "" if found.verdict is None else found.verdict.sentence,
            outcome.seconds,
            shortfall <= 0,
        )
        # Of those that meet the target, the fastest model is the best.
        order = (max(shortfall, 0.0), self._ranks[step.key])
        if self._best is None or order < self._best[0]:
            self._best = order, attempt, result
        return attempt

    def _loss(self, comparison: Comparison) -> float | None:
        """Return the loss of the verdict's first figure in percent.

        Returns:
            The loss, 0 to 100; None if the figure is no share and the target is in dB.

        Raises:
            ConfigError: the figure is no share, and the target is in percent.
        """
        share = _share_of(comparison.verdict)
        if share is not None:
            return 100.0 * (1.0 - share)
        if self._target.percent:
            task = "unknown" if comparison.verdict is None else comparison.verdict.task
            raise ConfigError(
                f"accuracy is {self._target.value:g}%, and the outputs have no share"
                f" that agrees (task {task}); give decibels, such as 25dB, or --task",
            )
        return None


def _share_of(verdict: Verdict | None) -> float | None:
    """Return the first figure of a verdict in [0, 1]; None if the figure is no share."""
    if verdict is None or not verdict.figures:
        return None
    figure = verdict.figures[0]
    if figure.name not in _SHARES or isnan(figure.value):
        return None
    return figure.value


__all__ = [
    "AccuracyResult",
    "AccuracyTarget",
    "Attempt",
    "quantize_to_accuracy",
    "steps_of",
]
