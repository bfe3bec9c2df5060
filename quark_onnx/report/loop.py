"""Errors of recurrent models with fed-back states over several samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from calibrators.onnx_runtime.worker import Session
from quark_onnx.graph.states import State
from quark_onnx.report.measure import OutputError, Total

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
            samples but the first, which a single run has measured. None for fewer than two
            samples, or for states of changing shape.
    """
    if len(samples) < 2 or not states:
        return []
    names = [value.name for value in reference.get_outputs()]
    updated = {state.output for state in states}
    totals = {name: Total() for name in names}
    own: list[dict[str, Any]] = [{}, {}]
    for place, sample in enumerate(samples):
        results = []
        for session, carried in zip((reference, other), own, strict=True):
            given = {name: sample[name].shape for name in carried if name in sample}
            if given != {name: value.shape for name, value in carried.items()}:
                return []
            feeds = {
                value.name: sample[value.name]
                for value in session.get_inputs()
                if value.name in sample
            }
            results.append(
                dict(zip(names, session.run(names, feeds | carried), strict=True)),
            )
        own = [
            {state.input: found[state.output] for state in states} for found in results
        ]
        for name in names:
            if place == len(samples) - 1 or (place and name not in updated):
                totals[name].add(*(found[name] for found in results))
    errors = [
        replace(total.result(name), steps=len(samples))
        for name, total in totals.items()
    ]
    return [error for error in errors if error.sqnr is not None]


def verdicts(errors: Sequence[OutputError], states: Sequence[State]) -> list[str]:
    """Return a note on every recurrent output: whether the error grows over samples."""
    if states and not any(error.steps for error in errors):
        names = ", ".join(f"{state.output!r} to {state.input!r}" for state in states)
        return [
            (
                f"recurrent states ({names}) were not measured from step to step: there"
                " are no consecutive samples"
            ),
        ]
    single = {error.name: error.sqnr for error in errors if not error.steps}
    notes = list[str]()
    for error in errors:
        alone = single.get(error.name)
        if not error.steps or error.sqnr is None or alone is None:
            continue
        found = (
            f"{error.name!r}: {error.sqnr:.1f} dB after {error.steps} samples with its"
            f" own state, {alone:.1f} dB"
        )
        kept = error.sqnr >= alone - _LOST
        if error.sqnr >= _GOOD or (kept and error.sqnr >= _USABLE):
            notes.append(
                (
                    f"{found} in single runs: it holds"
                    if kept
                    else f"{found} in single runs: it loses, and is good"
                ),
            )
            continue
        alike = kept and alone < _USABLE
        why = (
            "poor either way, not by its state"
            if alike
            else f"errors accumulate in the recurrent state; {_ADVICE}"
        )
        notes.append(f"{found} in single runs: {why}")
        logger.warning("%s", notes[-1])
    return notes
