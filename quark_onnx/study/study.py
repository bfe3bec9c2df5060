"""Study: the loop of every search, which tries each candidate once.

Candidates come from a list in its order, from Optuna's sampler, or from the bisection of a ranked
list. Their records are kept in memory, or in a journal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from quark_onnx.common.warnings_once import WarningsOnce

C = TypeVar("C")
R = TypeVar("R")


class Records(Protocol[C, R]):
    """The records of a study's candidates."""

    def finished(self) -> list[tuple[C, R]]:
        """Return each candidate with its record, in starting order."""

    def running(self) -> list[Hashable]:
        """Return the keys of candidates in evaluation by other processes."""

    def known(self, candidate: C) -> R | None:
        """Return the record of a candidate from another study."""

    def claim(self, candidate: C) -> bool:
        """Mark a candidate as running; return False if another process has it."""

    def keep(self, record: R) -> None:
        """Store the record of the running candidate."""

    def drop(self) -> None:
        """End the running candidate, if there is one, without a record."""


class Memory(Generic[C, R]):
    """Records of a study in memory."""

    def __init__(self) -> None:
        self._finished = list[tuple[C, R]]()
        self._running = list[C]()

    def finished(self) -> list[tuple[C, R]]:
        """Return each candidate with its record, in starting order."""
        return self._finished

    def running(self) -> list[Hashable]:
        """Return no keys: no other process has candidates."""
        return []

    def known(self, candidate: C) -> R | None:
        """Return None: no other process has records."""

    def claim(self, candidate: C) -> bool:
        """Mark a candidate as running."""
        self._running = [candidate]
        return True

    def keep(self, record: R) -> None:
        """Store the record of the running candidate."""
        self._finished.append((self._running.pop(), record))

    def drop(self) -> None:
        """End the running candidate, if there is one, without a record."""
        self._running.clear()


class Study(Generic[C, R]):
    """Search that tries each candidate once.

    Args:
        measure: function from a candidate to its record, or to None if its time ran out.
        records: the records of candidates; None to keep them in memory.
        key: function from a candidate to the key that equal candidates have in common.
        fits: function of a candidate and all finished candidates with their records; it returns
            False if the candidate would exceed the budget.
        is_enough: function from a record to whether it ends the study.
    """

    def __init__(
        self,
        measure: Callable[[C], R | None],
        records: Records[C, R] | None = None,
        *,
        key: Callable[[C], Hashable] = attrgetter("key"),
        fits: Callable[[C, list[tuple[C, R]]], bool] = lambda *_: True,
        is_enough: Callable[[R], bool] = lambda _: False,
    ) -> None:
        self._measure, self._key = measure, key
        self._fits, self._is_enough = fits, is_enough
        self._records: Records[C, R] = Memory() if records is None else records
        # Candidates without a record, by key, with a note for their names.
        self._untried = dict[Hashable, tuple[C, str]]()
        self._warnings = WarningsOnce()

    def finished(self) -> list[tuple[C, R]]:
        """Return each candidate with its record, in starting order.

        Returns:
            Candidates and records, including those of other processes and failed ones.
        """
        return self._records.finished()

    def is_reached(self) -> bool:
        """Return whether the record of a finished candidate is enough."""
        return any(self._is_enough(record) for _, record in self.finished())

    @property
    def untried(self) -> list[C]:
        """The candidates that did not fit into the budget."""
        return [candidate for candidate, _ in self._untried.values()]

    @property
    def untried_names(self) -> list[str]:
        """The names of ``untried``, with a note on those whose time ran out."""
        untried: Iterable[tuple[Any, str]] = self._untried.values()
        return [f"{candidate.name}{note}" for candidate, note in untried]

    def first_open(self, candidates: Iterable[C]) -> C | None:
        """Return the first candidate to try; candidates before it that do not fit become untried.

        Args:
            candidates: candidates in their order.

        Returns:
            A candidate that is neither finished, running nor untried; None if there is none.
        """
        finished = self.finished()
        closed = {self._key(candidate) for candidate, _ in finished}
        closed.update(self._records.running(), self._untried)
        for candidate in candidates:
            key = self._key(candidate)
            if key in closed:
                continue
            # A known record takes no time, so that it fits any budget.
            if self._records.known(candidate) is not None:
                return candidate
            if self._fits(candidate, finished):
                return candidate
            self._untried[key] = candidate, ""
        return None

    def run(self, candidates: Iterable[C]) -> Iterator[tuple[C, R]]:
        """Try candidates in their order, each once, until one is enough.

        Args:
            candidates: the candidates. The next one is taken after the record of the last, so that
                a generator can choose it by the records.

        Yields:
            Each candidate that was tried, with its record.
        """
        if self.is_reached():
            return
        try:
            for candidate in candidates:
                is_open = self.first_open([candidate]) is not None
                if not is_open or not self._records.claim(candidate):
                    continue
                record = self._records.known(candidate)
                if record is None:
                    with self._warnings:
                        record = self._measure(candidate)
                if record is None:
                    note = " (ended: the budget was over)"
                    self._untried[self._key(candidate)] = candidate, note
                    self._records.drop()
                    continue
                self._records.keep(record)
                yield candidate, record
                if self.is_reached():
                    return
        # Other processes would skip a candidate that stays marked as running in a journal.
        finally:
            self._records.drop()

    def record_of(self, candidate: C) -> R:
        """Return the record of a candidate, and try the candidate if there is none.

        Args:
            candidate: a candidate of a study without a budget, in memory.
        """
        key = self._key(candidate)
        for finished, record in self.finished():
            if self._key(finished) == key:
                return record
        ((_, record),) = self.run([candidate])
        return record


def bisected(low: int, high: int, passes: Callable[[int], bool]) -> int:
    """Return the least number that passes, by bisection.

    Args:
        low: a number that fails, such as one below all candidates.
        high: a number above ``low`` that is assumed to pass.
        passes: monotonic function of a number between ``low`` and ``high``: above a number that
            passes, all pass.
    """
    while high - low > 1:
        middle = (low + high) // 2
        if passes(middle):
            high = middle
        else:
            low = middle
    return high
