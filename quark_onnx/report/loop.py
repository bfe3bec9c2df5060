"""Errors of recurrent models with fed-back states over several samples."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import filterfalse
from operator import attrgetter
from typing import Any

from numpy.typing import NDArray

from calibrators.onnx_runtime.worker import Session
from quark_onnx.common.containers import excluding, names_of, subset
from quark_onnx.common.wording import counted
from quark_onnx.graph.states import State
from quark_onnx.report.measure import OutputError, OutputTotals

logger = logging.getLogger(__name__)

#: Acceptable loss over many samples against single runs, the minimum usable SQNR, and an SQNR
#: that is always good, in dB.
_LOST, _USABLE, _GOOD = 6.0, 10.0, 20.0
_ADVICE = (
    "calibrate on samples that hold the states of a running model, keep the layers that"
    " compute it float (exclude), or use 16-bit activations (A16W8) or float ones (W8)"
)

Sample = Mapping[str, NDArray[Any]]


def measure_loop(
    reference: Session,
    other: Session,
    samples: Sequence[Sample],
    states: Sequence[State],
) -> list[OutputError]:
    """Run two sessions over consecutive samples with fed-back states.

    Args:
        reference: session on the float model.
        other: session on the quantized model.
        samples: consecutive samples; the first sample holds the initial states.
        states: outputs that are inputs of the next sample.

    Returns:
        The error of each state after the last sample, and of each other float output over all
            samples but the first, which a single run has measured. Empty for fewer than two
            samples, without states, or for states of changing shape.
    """
    # A single sample has no state that an earlier one has left.
    if len(samples) < 2 or not states:
        return []
    # Each model reads its own states: errors add up from step to step as in use.
    before = _Recurrent(reference, states)
    after = _Recurrent(other, states)
    updated = {state.output for state in states}
    names = names_of(reference.get_outputs())
    totals = OutputTotals(names)
    last = len(samples) - 1
    for step, sample in enumerate(samples):
        # A state that grows with each sample (a cache of keys and values) does not fit the recorded
        # samples.
        if not before.takes(sample) or not after.takes(sample):
            return []
        expected = before.step(sample, names)
        found = after.step(sample, names)
        totals.add(_measured_at(step, last, names, updated), expected, found)
    errors = list[OutputError]()
    for error in totals.results():
        # Integer outputs have a share of equal values instead, and say nothing about drift.
        if error.sqnr is not None:
            # steps tells the rows apart from those of single runs, which have the same names.
            errors.append(replace(error, steps=len(samples)))
    return errors


def _measured_at(
    step: int,
    last: int,
    names: Iterable[str],
    updated: Container[str],
) -> list[str]:
    """Return the outputs to measure at a step.

    Args:
        step: number of the step, from 0.
        last: number of the last step.
        names: names of all outputs.
        updated: names of the outputs that are states, whose errors count at the end alone.
    """
    if step == last:
        return list(names)
    if step == 0:
        # a single run has measured the first sample
        return []
    return excluding(names, updated)


class _Recurrent:
    """A session with the states that its outputs leave for the next sample."""

    def __init__(self, session: Session, states: Sequence[State]) -> None:
        self._session = session
        self._states = states
        self._carried: dict[str, Any] = {}

    def takes(self, sample: Sample) -> bool:
        """Return whether the states have the shapes of a sample's.

        Args:
            sample: inputs by name, with recorded states.
        """
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
        inputs = names_of(self._session.get_inputs())
        feeds = subset(sample, inputs)
        # The carried states replace those of the sample; before the first step there are none.
        values = self._session.run(names, feeds | self._carried)
        outputs = dict(zip(names, values, strict=True))
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
    looped = list(filter(attrgetter("steps"), errors))
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
        return "poor either way, not by its state", True
    return f"errors accumulate in the recurrent state; {_ADVICE}", True
