"""Collection of two models' outputs over samples, for a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import ModelProto

from quark_onnx.common.containers import by_name, present
from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.common.wording import counted
from quark_onnx.report.figures import near_limits, percentage
from quark_onnx.report.measure import OutputError, least_sqnr
from quark_onnx.report.verdict.advice import Settings, next_steps
from quark_onnx.report.verdict.boxes import arrays_of
from quark_onnx.report.verdict.judges import Judge, judge_for
from quark_onnx.report.verdict.task import Task, find_task
from quark_onnx.report.verdict.verdict import (
    TASKS,
    THRESHOLDS,
    Band,
    Figure,
    Threshold,
    Verdict,
    limits_of,
    worst_band,
)

#: Maximum number of samples for a verdict; a sample may be a batch.
MOST_SAMPLES = 32
#: Tasks judged by predicted classes, and the output SQNR in dB below which they are risky at best.
#: A class survives large errors of its scores on easy samples, and hides them.
_OF_CLASSES, _LEAST_SQNR = ("classifier", "segmentation"), 10.0
#: With fewer rows, SQNR contributes to the band of every task.
_FEW_ROWS = 16


def check_task(task: str) -> None:
    """Check the name of a task.

    Raises:
        ConfigError: the task does not exist.
    """
    if task not in ("auto", *TASKS):
        raise ConfigError(
            f"task is {task!r}; it must be one of auto, {', '.join(TASKS)}"
            f"{nearest(str(task), TASKS)}",
        )


class VerdictCollector:
    """A collector of the outputs of a float and a quantized model, sample by sample.

    The task is detected on the first sample. Figures are stored, not outputs.
    """

    def __init__(self, model: ModelProto, task: str = "auto") -> None:
        """Start without samples.

        Args:
            model: the float model.
            task: name of a task in ``TASKS``, or ``auto``.
        """
        check_task(task)
        self._model = model
        self._asked = task
        self.task: Task | None = None
        self._judge: Judge | None = None
        self.samples = self.rows = 0

    def add(
        self,
        feeds: Mapping[str, Any],
        expected: Mapping[str, Any],
        found: Mapping[str, Any],
    ) -> None:
        """Add a sample with the outputs of the two models.

        Args:
            feeds: inputs by name.
            expected: outputs of the float model by name.
            found: outputs of the quantized model by name.
        """
        # Sequences and maps have no judge.
        before, after = arrays_of(expected), arrays_of(found)
        given = arrays_of(feeds)
        self.samples += 1
        # Rows of the batch; inputs without a batch axis have fewer.
        self.rows += max((len(each) for each in given.values() if each.ndim), default=1)
        with np.errstate(all="ignore"):  # outputs may hold infinities
            if self.task is None:
                self.task = find_task(self._model, given, before, self._asked)
                self._judge = judge_for(self.task)
            # A sample on which the float model's output has another form does not count.
            if self._judge is None or not self.task.reads(before):
                return
            # The quantized model's output may have another shape; require_same_shapes reports that.
            if self.task.reads(after):
                self._judge.add(given, before, after)

    def verdict(
        self,
        errors: Sequence[OutputError],
        *,
        held_out: int,
        calibrated: bool = True,
        random: bool = False,
        settings: Settings | None = None,
    ) -> Verdict | None:
        """Return the verdict; None without samples.

        Args:
            errors: errors of the outputs.
            held_out: number of samples not used for calibration.
            calibrated: whether the rest was used for calibration; False if unknown.
            random: whether the samples are random numbers, which give no verdict.
            settings: settings of the run, for advice; None for no advice.
        """
        if self.task is None:
            return None
        task, shown = self._shown(errors)
        band: Band
        if random:
            # Random numbers activate a network in no usual way.
            band = "unknown"
            measured_on = "random data, which tells that the model runs and little more"
        else:
            band = self._band(task, shown, errors)
            measured_on = _measured_on(self.samples, held_out, calibrated=calibrated)
        advice = settings is not None and band in ("risky", "poor")
        return Verdict(
            task,
            band,
            _sentence(task, shown) + self._reservation(task, shown, band),
            shown,
            self.samples,
            held_out,
            measured_on,
            # The repeated test of settings is for the type checker.
            next_steps(self._model, settings, task) if advice and settings else (),
        )

    def _reservation(self, task: str, figures: Sequence[Figure], band: Band) -> str:
        """Return why a verdict is risky although the figure that decides is good.

        Args:
            task: name of the task.
            figures: the measured values.
            band: band of the verdict.

        Returns:
            A clause for the end of the sentence; empty without a reservation.
        """
        known = by_name(figures)
        # The bands without the reservations: those must be good for a reservation to explain
        # "risky".
        bands = _bands(THRESHOLDS[task], known)
        if band != "risky" or worst_band(bands) != "good":
            return ""
        if _hides_errors(task, known):
            return f"; risky because the SQNR is below {_LEAST_SQNR:g} dB"
        if _is_uncertain(task, known):
            samples = counted(self.rows, "sample is", "samples are")
            return f"; risky because {samples} too few to be sure"
        return ""

    def band(self, errors: Sequence[OutputError]) -> Band:
        """Return the band over the samples so far."""
        return self._band(*self._shown(errors), errors)

    def _shown(
        self,
        errors: Sequence[OutputError],
    ) -> tuple[str, tuple[Figure, ...]]:
        """Return the task and the figures.

        The task is a signal if no task-specific comparison was possible.
        """
        with np.errstate(all="ignore"):
            figures = self._judge.figures() if self._judge is not None else ()
        # Without a figure of the task, the SQNR decides by the thresholds of a signal.
        task = self.task.name if self.task is not None and figures else "signal"
        sqnr = least_sqnr(errors, math.nan)
        return task, (*figures, *_other_figures(errors, sqnr))

    def _band(
        self,
        task: str,
        figures: Iterable[Figure],
        errors: Sequence[OutputError],
    ) -> Band:
        """Return the worst band of the figures with a threshold.

        Args:
            task: name of the task.
            figures: the measured values.
            errors: errors of the outputs.
        """
        known = by_name(figures)
        thresholds = THRESHOLDS[task]
        if self.rows < _FEW_ROWS and task != "signal":
            # Few rows may agree by chance; the SQNR counts every value of an output.
            thresholds = (*thresholds, *THRESHOLDS["signal"])
        # NaN or infinity where the float model is finite: no figure makes that usable.
        if any(error.broken for error in errors):
            return "poor"
        bands = _bands(thresholds, known)
        if _hides_errors(task, known) or _is_uncertain(task, known):
            bands.append("risky")
        return worst_band(bands)


def _bands(
    thresholds: Iterable[Threshold], figures: Mapping[str, Figure]
) -> list[Band]:
    """Return the band of each threshold's figure; ``unknown`` for a missing figure.

    Args:
        thresholds: the thresholds of a task.
        figures: measured figures by name.
    """
    bands = list[Band]()
    for threshold in thresholds:
        figure = figures.get(threshold.figure)
        bands.append("unknown" if figure is None else threshold.band(figure.value))
    return bands


def _is_uncertain(task: str, figures: Mapping[str, Figure]) -> bool:
    """Return whether a figure may be poor, by its lower bound, and the SQNR is not good.

    Args:
        task: name of a task in ``TASKS``.
        figures: measured figures by name; some have a lower bound.
    """
    sqnr = figures.get("sqnr")
    # A good SQNR on every output is evidence enough for few samples.
    if sqnr is not None and sqnr.value >= limits_of("signal", "sqnr")[0]:
        return False
    lower_bounds = list[Figure]()
    for figure in figures.values():
        if figure.least is not None:
            lower_bounds.append(replace(figure, value=figure.least))
    return "poor" in _bands(THRESHOLDS[task], by_name(lower_bounds))


def _hides_errors(task: str, figures: Mapping[str, Figure]) -> bool:
    """Return whether predicted classes agree although the outputs have large errors."""
    sqnr = figures.get("sqnr")
    return task in _OF_CLASSES and sqnr is not None and sqnr.value < _LEAST_SQNR


def _other_figures(errors: Sequence[OutputError], sqnr: float) -> list[Figure]:
    """Return the figure of every task: the SQNR, or for integers the share of equal values.

    Args:
        errors: errors of the outputs.
        sqnr: minimum SQNR over the outputs in dB; NaN if no output has one.

    Returns:
        One figure; none without outputs.
    """
    if not math.isnan(sqnr):
        shown = near_limits(sqnr, limits_of("signal", "sqnr"))
        return [Figure("sqnr", sqnr, f"SQNR {shown} dB")]
    # All outputs are integers, or random.
    shares = present(error.agreement for error in errors)
    if not shares:
        return []
    least = min(shares)
    shown = percentage(least, limits_of("signal", "equal"))
    return [Figure("equal", least, f"{shown} of the values are equal")]


_NAMES = {
    "classifier": "classifier",
    "segmentation": "segmentation",
    "detector": "detector",
    "embedding": "embeddings",
    "language": "language model",
    "image": "images",
    "signal": "outputs",
}


def _sentence(task: str, figures: Sequence[Figure]) -> str:
    texts = ", ".join(figure.text for figure in figures)
    return f"{_NAMES[task]}: {texts or 'no output could be compared'}"


def _measured_on(samples: int, held_out: int, *, calibrated: bool) -> str:
    """Return a description of the samples.

    Args:
        samples: number of samples that were run.
        held_out: number of them that calibration did not use.
        calibrated: whether the others were used for calibration; False if unknown.
    """
    if not calibrated:
        return counted(samples, "sample")
    # All held out is the usual, unbiased case; mixed samples name their bias.
    if held_out == samples:
        return f"{counted(samples, 'sample')} held out from calibration"
    rest = counted(samples - held_out, "calibration sample")
    optimistic = "which is optimistic: the ranges were made for them"
    if not held_out:
        return f"{rest}, {optimistic}"
    return f"{counted(held_out, 'held-out sample')} and {rest}, {optimistic}"
