"""Errors of recurrent models with fed-back states over several samples."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import filterfalse
from operator import attrgetter
from typing import Any

from numpy.typing import NDArray

from calibrators.onnx_runtime.remembering import without_memory
from calibrators.onnx_runtime.session import outputs_of
from calibrators.onnx_runtime.worker import Session
from quark_onnx.common.wording import counted
from quark_onnx.graph.states import State
from quark_onnx.report.measure import Observe, OutputError, OutputTotals, measure

logger = logging.getLogger(__name__)

#: Acceptable loss over many samples against single runs, the minimum usable SQNR, and an SQNR
#: that is always good, in dB.
_LOST, _USABLE, _GOOD = 6.0, 10.0, 20.0
_ADVICE = (
    "calibrate on samples that hold the states of a running model, keep the layers that"
    " compute it float (exclude), or use 16-bit activations (A16W8) or float ones (W8)"
)

Sample = Mapping[str, NDArray[Any]]


def measure_with_states(
    reference: Session,
    other: Session,
    samples: Iterable[Sample],
    states: Sequence[State],
    observe: Observe | None = None,
) -> list[OutputError]:
    """Return the errors of ``measure``, and those of a run over all samples with own states.

    Args:
        reference: session on the float model.
        other: session on the quantized model.
        samples: inputs by name, read once.
        states: outputs that are inputs of the next sample; none for a model without them.
        observe: called after each sample; None for none.
    """
    # The states of a loop are other inputs than those of any sample.
    loop = Loop(without_memory(reference), other, states)

    def each() -> Iterator[Sample]:
        for sample in samples:
            yield sample
            loop.add(sample)

    return [*measure(reference, other, each(), observe), *loop.errors()]


class Loop:
    """The errors of a recurrent model over consecutive samples with fed-back states.

    Each model reads its own states: errors add up from step to step as in use.
    """

    def __init__(
        self, reference: Session, other: Session, states: Sequence[State]
    ) -> None:
        """Start before the first sample, which holds the initial states.

        Args:
            reference: session on the float model.
            other: session on the quantized model.
            states: outputs that are inputs of the next sample.
        """
        self._before = _Recurrent(reference, states)
        self._after = _Recurrent(other, states)
        self._names = [value.name for value in reference.get_outputs()]
        self._updated = [state.output for state in states]
        self._totals = OutputTotals(self._names)
        self._last: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._steps = 0
        self._fits = bool(states)

    def add(self, sample: Sample) -> None:
        """Run both models on the next sample.

        Args:
            sample: inputs by name; the states in it count in the first step alone.
        """
        # A state that grows with each sample (a cache of keys and values) does not fit the recorded
        # samples.
        self._fits = (
            self._fits and self._before.takes(sample) and self._after.takes(sample)
        )
        if not self._fits:
            return
        expected = self._before.step(sample, self._names)
        actual = self._after.step(sample, self._names)
        # A single run has measured the first sample.
        if self._steps:
            others = [name for name in self._names if name not in self._updated]
            self._totals.add(others, expected, actual)
        # The errors of states count at the end alone.
        self._last = expected, actual
        self._steps += 1

    def errors(self) -> list[OutputError]:
        """Return the errors of the states after the last sample, and of the other float outputs.

        The first sample does not count. Empty for fewer than two samples, without states, or for
        states of changing shape.
        """
        if not self._fits or self._steps < 2 or self._last is None:
            return []
        self._totals.add(self._updated, *self._last)
        # Integer outputs have a share of equal values instead, and say nothing about drift. steps
        # tells the rows apart from those of single runs, which have the same names.
        return [
            replace(error, steps=self._steps)
            for error in self._totals.results()
            if error.sqnr is not None
        ]


class _Recurrent:
    """A session with the states that its outputs leave for the next sample."""

    def __init__(self, session: Session, states: Sequence[State]) -> None:
        self._session = session
        self._states = states
        self._carried: dict[str, Any] = {}

    def takes(self, sample: Sample) -> bool:
        """Return whether the recorded states of a sample have the shapes of the carried ones."""
        for name, value in self._carried.items():
            if name not in sample or sample[name].shape != value.shape:
                return False
        return True

    def step(self, sample: Sample, names: Sequence[str]) -> dict[str, Any]:
        """Run a sample with the states of the last one; return outputs by name.

        Args:
            sample: inputs by name; the states in it count in the first step alone.
            names: names of the outputs to return, among them those of all states.
        """
        # The carried states replace those of the sample; before the first step there are none.
        outputs = outputs_of(self._session, {**sample, **self._carried}, names)
        self._carried = {state.input: outputs[state.output] for state in self._states}
        return outputs


def verdicts(errors: Sequence[OutputError], states: Sequence[State]) -> list[str]:
    """Return a note on every recurrent output: whether the error grows over samples.

    Args:
        errors: errors of single runs, and errors over consecutive samples (``steps`` above 0).
        states: the recurrent states; none for a model without them.

    Returns:
        A line per output of the second kind that single runs have measured, too; or a line on
            missing consecutive samples.
    """
    looped = [error for error in errors if error.steps]
    if states and not looped:
        names = ", ".join(f"{state.output!r} to {state.input!r}" for state in states)
        return [
            (
                f"recurrent states ({names}) were not measured from step to step: there"
                " are no consecutive samples"
            ),
        ]
    independent = filterfalse(attrgetter("steps"), errors)
    single = {error.name: error.sqnr for error in independent}
    notes = list[str]()
    for error in looped:
        # The figure of independent runs is the one to compare with.
        alone = single.get(error.name)
        if error.sqnr is None or alone is None:
            continue
        finding, is_poor = _finding(error.sqnr, alone)
        notes.append(
            f"{error.name!r}: {error.sqnr:.1f} dB after {counted(error.steps, 'sample')} with its"
            f" own state, {alone:.1f} dB in single runs: {finding}",
        )
        if is_poor:
            logger.warning("%s", notes[-1])
    return notes


def _finding(looped: float, alone: float) -> tuple[str, bool]:
    """Return the effect of a state on an output in words, and whether to warn.

    Args:
        looped: SQNR over many samples, in dB.
        alone: SQNR of single runs, in dB.
    """
    # At most 6 dB less than in single runs: the error does not grow with the samples.
    kept = looped >= alone - _LOST
    if kept and looped >= _USABLE:
        return "it holds", False
    if looped >= _GOOD:
        return "it loses, and is good", False
    # Bad from the first sample on; the recurrence is not to blame.
    if kept and alone < _USABLE:
        return "poor in single runs as well; the recurrence is not the cause", True
    return f"errors accumulate in the recurrent state; {_ADVICE}", True
