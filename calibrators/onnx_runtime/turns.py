"""Runtimes of several models that run in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter

#: Runs a model a number of times, and returns the seconds of each run.
TimedRuns = Callable[[int], Sequence[float]]


def seconds_in_turns(
    models: Sequence[TimedRuns], turns: Iterable[int]
) -> list[list[float]]:
    """Return the seconds of the runs of each model.

    The models run in turns, so that a change of the clock or of the load of the machine meets all.

    Args:
        models: functions that run a model.
        turns: number of runs of each model, for every turn.

    >>> seconds_in_turns([lambda count: [0.5] * count, lambda count: [2.0] * count], [1, 2])
    [[0.5, 0.5, 0.5], [2.0, 2.0, 2.0]]
    """
    seconds: list[list[float]] = [[] for _ in models]
    for count in turns:
        for timed_runs, taken in zip(models, seconds, strict=True):
            taken += timed_runs(count)
    return seconds


def single_runs(seconds: float, least: int, most: int) -> Iterator[int]:
    """Yield turns of one run until a time is over.

    Args:
        seconds: the time, from the first turn on.
        least: minimum number of turns, which may take longer.
        most: maximum number of turns.

    >>> list(single_runs(0.0, least=2, most=5))
    [1, 1]
    """
    end = perf_counter() + seconds
    for done in range(most):
        if done >= least and perf_counter() > end:
            return
        yield 1
