"""Collection of two models' outputs over samples, for a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import ModelProto

from calibrators.onnx_runtime.worker import Session
from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.common.wording import counted, first_of
from quark_onnx.report.figures import near_limits, percentage
from quark_onnx.report.loop import measure_with_states
from quark_onnx.report.measure import Observe, OutputError, least_sqnr
from quark_onnx.report.verdict.advice import AdvisedSettings, next_steps
from quark_onnx.report.verdict.boxes import arrays_of
from quark_onnx.report.verdict.exhibits import Exhibits
from quark_onnx.report.verdict.judges import Judge, judge_for
from quark_onnx.report.verdict.task import Task, find_task, states_of
from quark_onnx.report.verdict.verdict import (
    TASKS,
    THRESHOLDS,
    Band,
    MeasuredValue,
    NextStep,
    Threshold,
    Verdict,
    limits_of,
    sqnr_of,
    worst_band,
)
from quark_onnx.running.branches import Branches

#: Tasks judged by predicted classes, and the output SQNR in dB below which they are risky at best.
#: A class survives large errors of its scores on easy samples, and hides them.
_OF_CLASSES, _LEAST_SQNR = ("classifier", "decisions", "segmentation"), 10.0
#: With fewer rows, SQNR contributes to the band of every task, and the samples must agree on its
#: band; with fewer than the second number there is none.
_FEW_ROWS, _LEAST_ROWS = 16, 3


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
        self.exhibits = Exhibits()
        self._branches = Branches(model)

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
        self._branches.add(feeds)
        with np.errstate(all="ignore"):  # outputs may hold infinities
            if self.task is None:
                self.task = find_task(self._model, given, before, self._asked)
                self._judge = judge_for(self.task)
            self.rows += _rows(given, before.get(self.task.output))
            # A sample on which the float model's output has another form does not count.
            if self._judge is None or not self.task.reads(before):
                return
            # The quantized model's output may have another shape; require_same_shapes reports that.
            if self.task.reads(after):
                self._judge.add(given, before, after)
                self.exhibits.add(self.task, given, before, after)

    def run(
        self,
        reference: Session,
        other: Session,
        samples: Iterable[Mapping[str, Any]],
        observe: Observe | None = None,
    ) -> list[OutputError]:
        """Run both models on samples, add the outputs, and return the errors.

        A model with recurrent states also runs over all samples with its own states.

        Args:
            reference: session on the float model.
            other: session on the quantized model.
            samples: inputs by name.
            observe: called after each sample; None for none.
        """

        def add(
            feeds: Mapping[str, Any],
            expected: Mapping[str, Any],
            found: Mapping[str, Any],
        ) -> None:
            self.add(feeds, expected, found)
            if observe is not None:
                observe(feeds, expected, found)

        states = states_of(self._model)
        return measure_with_states(reference, other, samples, states, add)

    def verdict(  # noqa: PLR0913
        self,
        errors: Sequence[OutputError],
        *,
        held_out: int,
        calibrated: bool = True,
        random: bool = False,
        settings: AdvisedSettings | None = None,
        samples_for: Callable[[int], int] = int,
    ) -> Verdict | None:
        """Return the verdict; None without samples.

        Args:
            errors: errors of the outputs.
            held_out: number of samples not used for calibration.
            calibrated: whether the rest was used for calibration; False if unknown.
            random: whether the samples are random numbers, which give no verdict.
            settings: settings of the run, for advice; None for no advice.
            samples_for: returns the number of samples to give, of which a number is held out from
                calibration.
        """
        if self.task is None:
            return None
        task, shown = self._shown(errors)
        measured = self._band(task, shown, errors)
        band, reservation = measured, self._reservation(task, shown, measured)
        measured_on = _measured_on(self.samples, held_out, calibrated=calibrated)
        if self._branches.unseen:
            measured_on += f", of which none takes {first_of(self._branches.unseen, 3)}"
        if random:
            # Random numbers activate a network in no usual way.
            band, reservation = "unknown", ""
            measured_on = "random data, which tells that the model runs and little more"
        elif not any(error.broken for error in errors):
            doubt = ""
            if calibrated and not held_out:
                doubt = "the ranges were made for these samples"
            elif self._is_unclear(errors):
                samples = counted(self.samples, "sample is", "samples are")
                doubt = f"{samples} too few to be sure"
            if doubt:
                band = "unclear"
                enough = math.ceil(_FEW_ROWS * self.samples / max(1, self.rows))
                needed = counted(samples_for(enough), "sample")
                reservation = f"; {doubt}: give at least {needed}"
        steps: tuple[NextStep, ...] = ()
        if settings is not None and not random and measured in ("risky", "poor"):
            settings = replace(settings, reached=sqnr_of(shown))
            steps = next_steps(self._model, settings, task)
        return Verdict(
            task,
            band,
            _sentence(task, shown) + reservation,
            shown,
            self.samples,
            held_out,
            measured_on,
            steps,
        )

    def _is_unclear(self, errors: Iterable[OutputError]) -> bool:
        """Return whether there are too few rows for a band, or few that do not agree on it."""
        if self.rows >= _FEW_ROWS:
            return False
        return self.rows < _LEAST_ROWS or not all(map(_is_clear, errors))

    def _reservation(
        self, task: str, figures: Sequence[MeasuredValue], band: Band
    ) -> str:
        """Return why a verdict is risky although the figure that decides is good.

        Args:
            task: name of the task.
            figures: the measured values.

        Returns:
            A clause for the end of the sentence; empty without a reservation.
        """
        known = {figure.name: figure for figure in figures}
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

    def _shown(
        self,
        errors: Sequence[OutputError],
    ) -> tuple[str, tuple[MeasuredValue, ...]]:
        """Return the task and the figures.

        Where no task-specific comparison was possible, the SQNR decides.
        """
        task = "signal" if self.task is None else self.task.name
        with np.errstate(all="ignore"):
            figures = self._judge.figures() if self._judge is not None else ()
        if self._judge is not None and not figures:
            # Vectors that are no classes after all are quantities.
            task = "regression" if task == "classifier" else "signal"
        return task, (*figures, *_other_figures(errors, whole=bool(figures)))

    def _band(
        self,
        task: str,
        figures: Iterable[MeasuredValue],
        errors: Sequence[OutputError],
    ) -> Band:
        """Return the worst band of the figures with a threshold.

        Args:
            task: name of the task.
            figures: the measured values.
        """
        known = {figure.name: figure for figure in figures}
        thresholds = THRESHOLDS[task]
        has_own = any(threshold.figure in known for threshold in thresholds)
        if self.rows < _FEW_ROWS or not has_own:
            # Few rows may agree by chance; the SQNR counts every value of an output.
            thresholds = (*thresholds, *THRESHOLDS["signal"])
        # NaN or infinity where the float model is finite: no figure makes that usable.
        if any(error.broken for error in errors):
            return "poor"
        bands = _bands(thresholds, known)
        if _hides_errors(task, known) or _is_uncertain(task, known):
            bands.append("risky")
        return worst_band(bands)


def _rows(feeds: Mapping[str, Any], output: Any) -> int:
    """Return the number of rows of a batch; 1 for a sample without an axis of a batch.

    Args:
        feeds: arrays of the inputs by name.
        output: the judged output; None if it is no array.
    """
    sizes = {len(feed) if feed.ndim else 1 for feed in feeds.values()}
    if output is not None:
        sizes.add(len(output) if output.ndim else 1)
    # An input of all rows has as many as the others, and so has the output.
    return max(1, sizes.pop()) if len(sizes) == 1 else 1


def _is_clear(error: OutputError) -> bool:
    """Return whether all samples have the SQNR of one band; True for an error without an SQNR."""
    judged = error.sqnr_of_changes
    if error.sqnr is None or judged is None or error.steps:
        return True
    if error.spread is None:
        return False
    # The share of the constant part is that of all samples.
    constant = error.sqnr - judged if math.isfinite(error.sqnr) else 0.0
    least, _, greatest = error.spread
    limit = THRESHOLDS["signal"][0]
    return limit.band(least - constant) == limit.band(greatest - constant)


def _bands(
    thresholds: Iterable[Threshold], figures: Mapping[str, MeasuredValue]
) -> list[Band]:
    """Return the band of each threshold's figure; ``unknown`` for a missing figure."""
    bands = list[Band]()
    for threshold in thresholds:
        figure = figures.get(threshold.figure)
        bands.append("unknown" if figure is None else threshold.band(figure.value))
    return bands


def _is_uncertain(task: str, figures: Mapping[str, MeasuredValue]) -> bool:
    """Return whether a figure may be poor, by its lower bound, and the SQNR is not good.

    Args:
        task: name of a task in ``TASKS``.
        figures: measured figures by name; some have a lower bound.
    """
    sqnr = figures.get("sqnr")
    # A good SQNR on every output is evidence enough for few samples.
    if sqnr is not None and sqnr.value >= limits_of("signal", "sqnr")[0]:
        return False
    lower_bounds = {
        figure.name: replace(figure, value=figure.least)
        for figure in figures.values()
        if figure.least is not None
    }
    return "poor" in _bands(THRESHOLDS[task], lower_bounds)


def _hides_errors(task: str, figures: Mapping[str, MeasuredValue]) -> bool:
    """Return whether predicted classes agree although the outputs have large errors."""
    sqnr = figures.get("sqnr")
    return task in _OF_CLASSES and sqnr is not None and sqnr.value < _LEAST_SQNR


def _other_figures(
    errors: Sequence[OutputError], *, whole: bool
) -> list[MeasuredValue]:
    """Return the figure of every task: the SQNR, or for integers the share of equal values.

    Args:
        whole: take the SQNR of whole outputs, where another figure decides; else that of their
            varying part, which a constant offset does not raise.

    Returns:
        One figure; none without outputs.
    """
    least = least_sqnr(errors, math.nan)
    judged = least
    if not whole:
        changes = [error.sqnr_of_changes for error in errors]
        judged = min(
            (change for change in changes if change is not None), default=least
        )
    if not math.isnan(least):
        shown, shown_whole = (
            near_limits(judged, limits_of("signal", "sqnr")),
            near_limits(least),
        )
        text = f"SQNR {shown} dB"
        # The table of outputs has the SQNR of the whole: two figures need two names.
        if judged < least and shown != shown_whole:
            text += f" of what varies ({shown_whole} dB with the constant part)"
        return [MeasuredValue("sqnr", judged, text)]
    # All outputs are integers, or random.
    shares = [error.agreement for error in errors if error.agreement is not None]
    if not shares:
        return []
    share = min(shares)
    shown = percentage(share, limits_of("signal", "equal"))
    return [MeasuredValue("equal", share, f"{shown} of the values are equal")]


#: Names of tasks in sentences, where they differ.
_NAMES = {
    "mask": "masks",
    "embedding": "embeddings",
    "language": "language model",
    "image": "images",
    "series": "time series",
    "signal": "outputs",
}


def _sentence(task: str, figures: Sequence[MeasuredValue]) -> str:
    texts = ", ".join(figure.text for figure in figures)
    return f"{_NAMES.get(task, task)}: {texts or 'no output could be compared'}"


def _measured_on(samples: int, held_out: int, *, calibrated: bool) -> str:
    """Return a description of the samples.

    Args:
        samples: number of samples that were run.
        held_out: number of them that calibration did not use: all or none.
        calibrated: whether calibration used the others; False if unknown.
    """
    if not calibrated:
        return counted(samples, "sample")
    if held_out:
        return f"{counted(samples, 'sample')} held out from calibration"
    return f"{counted(samples, 'calibration sample')}, which is optimistic"
