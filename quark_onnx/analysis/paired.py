"""Paired comparison of two quantized models: is the gain of one of them more than chance?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from calibrators.onnx_runtime.session import open_session, outputs_of
from calibrators.readers.spool import Spool
from quark_onnx.engines import open_quantized
from quark_onnx.report.measure import OutputTotals, least_sqnr
from quark_onnx.report.verdict import THRESHOLDS
from quark_onnx.report.verdict.boxes import arrays_of
from quark_onnx.report.verdict.judges import judge_for
from quark_onnx.report.verdict.task import Task, find_task
from quark_onnx.running.function_bodies import with_bodies

Floats = NDArray[np.float64]

#: The figure that users of the model see. The others of the task follow the SQNR.
_SEEN = {"embedding": "rank"}
#: Maximum number of groups of the jackknife.
_GROUPS = 10
#: Bounds of the 99 % interval in standard errors, by degrees of freedom from 1: quantiles of
#: Student's t. Several changes are tried, of which one would pass 95 % by chance.
_QUANTILES = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25)
#: Limit of a figure: the SQNR and the PSNR of equal values are infinite.
_MOST = 200.0


class Paired:
    """Comparison of quantized models with a first one, on common samples.

    The figure is that of the task. Where the task has none, it is the mean over samples of the SQNR
    of the worst output in dB, on which single samples with large errors weigh no more than others.
    The difference is tested by the delete-a-group jackknife (Efron, The Jackknife, the Bootstrap
    and Other Resampling Plans, 1982), which holds for figures that are no mean over samples, too.
    """

    def __init__(
        self,
        reference: ModelProto,
        first: ModelProto,
        samples: Sequence[Mapping[str, Any]],
        task: str,
        asked: str = "auto",
    ) -> None:
        """Run nothing yet.

        Args:
            reference: the float model.
            first: the quantized model that others are compared with.
            samples: inputs by name, on which no model was calibrated; one or more.
            task: the task of the verdict, a name in ``THRESHOLDS``.
            asked: the task as for ``quantize``, by which the judged output is found.
        """
        self._reference, self._first = reference, first
        self._samples, self._name, self._asked = samples, task, asked

    def is_clear_gain(self, other: ModelProto) -> bool:
        """Return whether another model is better than the first one by more than chance."""
        return is_clear_gain(self.pseudo_values(other) - self._before)

    @cached_property
    def _before(self) -> Floats:
        return self.pseudo_values(self._first)

    @cached_property
    def _expected(self) -> Spool:
        return self._outputs(self._reference)

    @cached_property
    def _task(self) -> Task | None:
        """The task with its judged output; None where the SQNR decides."""
        task = find_task(
            self._reference, self._samples[0], self._expected[0], self._asked
        )
        # The verdict on classes that are quantities after all is that of a regression.
        has_figure = task.name == self._name and judge_for(task) is not None
        return task if has_figure else None

    def _outputs(self, model: ModelProto) -> Spool:
        """Return the arrays among the outputs of a model, by sample."""
        opened = open_session if model is self._reference else open_quantized
        session = opened(with_bodies(model), what="a model to compare")
        outputs = Spool()
        for sample in self._samples:
            outputs.append(arrays_of(outputs_of(session, sample)))
        return outputs

    def pseudo_values(self, model: ModelProto) -> Floats:
        """Return the jackknife's pseudo-values of a model's figure, (groups,).

        Greater is better. Of a mean over samples they are the means of the groups.
        """
        found = self._outputs(model)
        places = np.arange(len(self._samples))
        count = min(_GROUPS, len(places))
        whole = self._value(found, places)
        values = list[float]()
        for group in range(count):
            without = self._value(found, places[places % count != group])
            values.append(count * whole - (count - 1) * without)
        return np.array(values)

    def _value(self, found: Spool, places: Iterable[int]) -> float:
        """Return the figure over some samples; NaN if it could not be measured."""
        expected, task = self._expected, self._task
        judge = None if task is None else judge_for(task)
        if task is None or judge is None:
            return _decibels(expected, found, places)
        for place in places:
            before, after = expected[place], found[place]
            if task.reads(before) and task.reads(after):
                judge.add(self._samples[place], before, after)
        figures = {figure.name: figure.value for figure in judge.figures()}
        threshold = THRESHOLDS[self._name][0]
        seen = _SEEN.get(self._name, threshold.figure)
        value = figures.get(seen, np.nan)
        return float(np.clip(value if threshold.rising else -value, -_MOST, _MOST))


def _decibels(expected: Spool, found: Spool, places: Iterable[int]) -> float:
    """Return the mean SQNR of a sample's worst output in dB; NaN if no output is float."""
    names = list(expected[0])
    ratios = list[float]()
    for place in places:
        totals = OutputTotals(names)
        totals.add(names, expected[place], found[place])
        ratios.append(least_sqnr(totals.results(), np.nan))
    return float(np.clip(ratios, -_MOST, _MOST).mean())


def is_clear_gain(differences: Floats) -> bool:
    """Return whether the mean of paired differences is above zero by more than chance.

    Args:
        differences: (count,), at most ten; NaN where nothing was measured.

    >>> is_clear_gain(np.array([0.8, 0.9, 1.0])), is_clear_gain(np.array([1.0, 0.0, 0.0]))
    (True, False)
    """
    count = len(differences)
    if count < 2 or not np.isfinite(differences).all():
        return False
    error = differences.std(ddof=1) / count**0.5
    return bool(differences.mean() > _QUANTILES[count - 2] * error)
