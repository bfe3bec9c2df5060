"""quantize_to_accuracy: the cheapest configuration that keeps the accuracy asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from time import perf_counter
from typing import Any

from onnx import ModelProto

from calibrators.base import is_number
from calibrators.readers.spool import MEMORY, Spool
from quark_onnx.analysis.compare import Comparison, compare
from quark_onnx.api import quantize
from quark_onnx.config import QConfig, to_dict
from quark_onnx.errors import (
    ConfigError,
    DataError,
    ModelError,
    QuarkError,
    TimeLimitError,
    data_errors,
)
from quark_onnx.graph import Graph, inlined
from quark_onnx.graph.io import load, staged
from quark_onnx.job import Result
from quark_onnx.optimizers import AutoMixedPrecision
from quark_onnx.progress import Progress, time_limit
from quark_onnx.recipes import Choice, choose
from quark_onnx.registry import RECIPES
from quark_onnx.steps import Calibration, destination, keeps_weights_beside, reader_for

#: One sample in so many judges, the second of each group, and at most so many do in all.
_EVERY, _AT_MOST = 4, 256
#: At most this share of the nodes stays float before 16 bits are tried.
_FLOAT_SHARE = 0.25
#: Figures of verdicts that are shares, of which a loss in percent can be told.
_SHARES = frozenset({"agreement", "f1", "cosine", "equal"})
_TARGET = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(%|dB)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """The accuracy that a quantized model must keep.

    Attributes:
        value: percent that may be lost, or decibels that every output must have.
        percent: which of the two.
    """

    value: float
    percent: bool

    @classmethod
    def of(cls, text: object) -> Target:
        """Return the target that a text such as ``"1%"`` or ``"25dB"`` stands for; a number is dB.

        Raises:
            ConfigError: it is none.

        >>> Target.of("0.5 %"), Target.of(25)
        (Target(value=0.5, percent=True), Target(value=25.0, percent=False))
        """
        if is_number(text):
            return cls(float(text), False)  # type: ignore[arg-type]
        found = _TARGET.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ConfigError(
                f"accuracy is {text!r}; it must be a loss such as 1%, or a least SQNR"
                " such as 25dB",
            )
        return cls(float(found[1]), found[2] == "%")

    def __str__(self) -> str:
        if self.percent:
            return f"a loss of at most {self.value:g} %"
        return f"{self.value:g} dB at every output"


@dataclass(frozen=True)
class Attempt:
    """A configuration that was tried.

    Attributes:
        name: preset, recipe and optimizers.
        config: the configuration.
        sqnr: of the worst output on the held-out samples, in dB; None if it failed.
        loss: percent of the verdict's first figure that is lost; None where it is no share.
        figure: the verdict's sentence.
        seconds: how long quantizing and judging took.
        met: whether it keeps the accuracy.
        error: why it failed; empty if it did not.
    """

    name: str
    config: QConfig
    sqnr: float | None
    loss: float | None
    figure: str
    seconds: float
    met: bool
    error: str = ""


@dataclass(frozen=True)
class AccuracyResult:
    """What was tried to keep an accuracy.

    Attributes:
        target: the accuracy asked for.
        attempts: what was tried, in its order.
        left: names of configurations that did not fit into the budget.
        best: the attempt that was written: the first that met the target, else the nearest.
        result: its model and report.
        judged: number of samples that judged and calibrated nothing.
        choice: the recipe, and why.
    """

    target: Target
    attempts: tuple[Attempt, ...]
    left: tuple[str, ...]
    best: Attempt
    result: Result
    judged: int
    choice: Choice

    @property
    def reached(self) -> bool:
        """Whether the target was met."""
        return self.best.met

    @property
    def resolution(self) -> float:
        """The least loss in percent that the samples can show, where each counts once."""
        return 100.0 / self.judged

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return {
            "target": {"value": self.target.value, "percent": self.target.percent},
            "reached": self.reached,
            "judged": self.judged,
            "recipe": self.choice.recipe.name,
            "left": list(self.left),
            "best": self.best.name,
            "attempts": [
                {**vars(each), "config": to_dict(each.config)} for each in self.attempts
            ],
        }


def quantize_to_accuracy(  # noqa: PLR0913
    model: str | Path | ModelProto,
    data: Any,
    accuracy: str | float,
    output: str | Path | None = None,
    *,
    recipe: str = "auto",
    task: str = "auto",
    budget: float | None = None,
    progress: bool | None = False,
) -> AccuracyResult:
    """Try configurations, those with the fastest results first, until one is accurate enough.

    Integers of 8 bits come first: plain, with bias correction, by the recipe for the kind of model,
    and with learned codes; then, for decibels, with some nodes in float; then activations of 16
    bits, and weights alone.

    Args:
        model: the float model, a path or a ModelProto.
        data: anything that ``quantize_static`` takes as data. A quarter of the samples judges and
            calibrates nothing.
        accuracy: ``"1%"``: at most so much of the agreement with the float model, in the terms of
            the task, is lost; or ``"25dB"``: every output has at least this SQNR.
        output: where to write the model; also the nearest one where none is accurate enough.
        recipe: the kind of model, "auto" to choose by structure.
        task: as for ``quantize``.
        budget: seconds; a configuration that would not fit is not begun, and one that takes longer
            is ended. The first one is always finished.
        progress: as for ``quantize_static``.

    Raises:
        ConfigError: a setting is wrong, or a loss in percent means nothing for the task.
        DataError: the data does not fit the model, or there are fewer than two samples.
        ModelError: every configuration failed.
    """
    target = Target.of(accuracy)
    if budget is not None and not (is_number(budget) and 0 < budget < inf):
        raise ConfigError(
            f"budget is {budget!r}; it must be a number of seconds above 0",
        )
    choice = choose(model)
    if recipe != "auto":
        row = RECIPES[recipe]
        choice = Choice(row, row.config, "as asked for")
    with (
        Spool(memory=MEMORY // 2) as calibration,
        Spool(memory=MEMORY // 2) as judges,
    ):
        _read(model, data, calibration, judges, progress)
        ladder = _Ladder(model, calibration, judges, target, task, budget)
        found = ladder.climb(choice, progress)
    if output is not None:
        path = destination(model, output)
        assert path is not None
        beside = keeps_weights_beside(model, path)
        with staged(found.result.model, path, external=beside):
            pass  # it was checked, loaded and run when it was made
    return found


def _read(
    model: str | Path | ModelProto,
    data: Any,
    calibration: Spool,
    judges: Spool,
    progress: bool | None,
) -> None:
    """Read the data once, and hold samples out."""
    reader = reader_for(Graph.of(inlined(load(model))), data)
    with data_errors(), Progress(progress, reader.length, "reading", "sample") as bar:
        for index, sample in enumerate(reader):
            held_out = index % _EVERY == 1 and len(judges) < _AT_MOST
            (judges if held_out else calibration).append(sample)
            bar.update(index + 1)
    if not len(judges):
        raise DataError(
            "an accuracy needs at least two samples, one to calibrate on and another"
            " to judge by; the data has one",
        )


def steps_of(choice: Choice, target: Target) -> Iterator[tuple[str, QConfig]]:
    """Return configurations in the order of what their results cost, with their names.

    Which nodes to leave float is decided by decibels, so that only a target in decibels has such a
    configuration.
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
    tried = list[QConfig]()
    for name, config in (
        ("A8W8", plain),
        ("A8W8 bias_correction", plain.with_(optimizers=corrected)),
        (f"recipe {choice.recipe.name}", choice.config),
        (f"A8W8 {'+'.join(learned)}", plain.with_(optimizers=learned)),
        ("A8W8, some nodes float", None if target.percent else mixed),
        ("A16W8", wide),
        ("A16W8 bias_correction", wide.with_(optimizers=corrected)),
        ("W8", QConfig.of("W8")),
    ):
        if config is not None and config not in tried:
            tried.append(config)
            yield name, config


class _Ladder:
    def __init__(  # noqa: PLR0913
        self,
        model: str | Path | ModelProto,
        calibration: Spool,
        judges: Spool,
        target: Target,
        task: str,
        budget: float | None,
    ) -> None:
        self._start = perf_counter()
        self._model, self._calibration, self._judges = model, calibration, judges
        self._target, self._task, self._budget = target, task, budget
        self._ranges = Calibration("")
        self._best: tuple[float, Attempt, Result] | None = None

    def climb(self, choice: Choice, progress: bool | None) -> AccuracyResult:
        """Try one configuration after the other until one meets the target."""
        attempts, left = list[Attempt](), list[str]()
        steps = list(steps_of(choice, self._target))
        with Progress(progress, len(steps), "trying", "configuration") as bar:
            for done, (name, config) in enumerate(steps, 1):
                if not self._fits(attempts):
                    left.append(name)
                    continue
                attempt = self._attempt(name, config, first=not attempts)
                if attempt is None:
                    left.append(f"{name} (ended: the budget was over)")
                    continue
                attempts.append(attempt)
                bar.update(done)
                if attempt.met:
                    break
        if self._best is None:
            first = attempts[0]
            raise ModelError(
                f"every configuration failed; {first.name}: {first.error}",
            )
        _, best, result = self._best
        return AccuracyResult(
            self._target,
            tuple(attempts),
            tuple(left),
            best,
            result,
            len(self._judges),
            choice,
        )

    def _fits(self, attempts: list[Attempt]) -> bool:
        if self._budget is None or not attempts:
            return True
        fastest = min(attempt.seconds for attempt in attempts)
        return perf_counter() - self._start + fastest < self._budget

    def _attempt(self, name: str, config: QConfig, *, first: bool) -> Attempt | None:
        """Quantize and judge; None if the budget was over before the end."""
        start = perf_counter()
        limit = None
        if self._budget is not None and not first:
            limit = max(self._budget - (start - self._start), 0.0)
        try:
            with time_limit(limit):
                result = quantize(
                    self._model,
                    self._calibration if config.measures else None,
                    config,
                    ranges=self._ranges if config.measures else None,
                    task=self._task,
                )
                found = compare(
                    self._model, result.model, self._judges, task=self._task
                )
        except TimeLimitError:
            return None
        except QuarkError as error:
            seconds = perf_counter() - start
            text = " ".join(str(error).split())
            return Attempt(name, config, None, None, "", seconds, False, text)
        loss = self._loss(found)
        if self._target.percent:
            assert loss is not None
            shortfall = loss - self._target.value
        else:
            shortfall = self._target.value - found.sqnr
        attempt = Attempt(
            name,
            config,
            found.sqnr,
            loss,
            "" if found.verdict is None else found.verdict.sentence,
            perf_counter() - start,
            shortfall <= 0,
        )
        if self._best is None or shortfall < self._best[0]:
            self._best = shortfall, attempt, result
        return attempt

    def _loss(self, found: Comparison) -> float | None:
        """Return the percent that is lost of the figure that decides the verdict."""
        verdict = found.verdict
        figure = None if verdict is None or not verdict.figures else verdict.figures[0]
        if figure is not None and figure.name in _SHARES and not isnan(figure.value):
            return 100.0 * (1.0 - figure.value)
        if self._target.percent:
            task = "unknown" if verdict is None else verdict.task
            raise ConfigError(
                f"accuracy is {self._target.value:g}%, and the outputs have no share"
                f" that agrees (task {task}); give decibels, such as 25dB, or --task",
            )
        return None


__all__ = ["AccuracyResult", "Attempt", "Target", "quantize_to_accuracy", "steps_of"]
