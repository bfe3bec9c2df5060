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
        """Return None: there is no other study."""

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
    """Candidates, each of which is tried once.

    Args:
        measure: function from a candidate to its record; None if its time ran out.
        records: the records of candidates; None to keep them in memory.
        key: function from a candidate to the key that equal candidates have in common.
        fits: function of a candidate and of all finished ones with their records; False if the
            candidate would exceed the budget.
        is_enough: function of a record; True ends the study.
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
        self._left = dict[Hashable, tuple[C, str]]()
        self._warnings = WarningsOnce()

    def finished(self) -> list[tuple[C, R]]:
        """Return each candidate with its record, in starting order.

        Returns:
            Candidates and records, including those of other processes and failed ones.
        """
        return self._records.finished()

    def is_reached(self) -> bool:
        """Return whether a record is enough."""
        return any(self._is_enough(record) for _, record in self.finished())

    @property
    def untried(self) -> list[C]:
        """The candidates that did not fit into the budget."""
        return [candidate for candidate, _ in self._left.values()]

    @property
    def untried_names(self) -> list[str]:
        """The names of ``untried``, with a note on those whose time ran out."""
        left: Iterable[tuple[Any, str]] = self._left.values()
        return [f"{candidate.name}{note}" for candidate, note in left]

    def first_open(self, candidates: Iterable[C]) -> C | None:
        """Return the first candidate to try; those before it that do not fit are left out.

        Args:
            candidates: candidates in their order.

        Returns:
            A candidate that is neither finished nor running nor left out; None if there is none.
        """
        finished = self.finished()
        done = {self._key(candidate) for candidate, _ in finished}
        done.update(self._records.running(), self._left)
        for candidate in candidates:
            key = self._key(candidate)
            if key in done:
                continue
            # A known record takes no time.
            if self._records.known(candidate) is not None:
                return candidate
            if self._fits(candidate, finished):
                return candidate
            self._left[key] = candidate, ""
        return None

    def run(self, candidates: Iterable[C]) -> Iterator[tuple[C, R]]:
        """Try candidates in their order, each once, until one is enough.

        Args:
            candidates: the candidates; an iterator is asked for the next one after each record.

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
                    self._left[self._key(candidate)] = candidate, note
                    self._records.drop()
                    continue
                self._records.keep(record)
                yield candidate, record
                if self.is_reached():
                    return
        # A candidate that stays "running" in a journal would be left out by other processes.
        finally:
            self._records.drop()

    def record(self, candidate: C) -> R:
        """Return the record of a candidate, which is tried unless it was before.

        Args:
            candidate: a candidate of a study without a budget, in memory.
        """
        key = self._key(candidate)
        for other, record in self.finished():
            if self._key(other) == key:
                return record
        ((_, record),) = self.run([candidate])
        return record


def bisected(low: int, high: int, passes: Callable[[int], bool]) -> int:
    """Return the least number that passes, by bisection.

    Args:
        low: a number that is known to fail, or below all.
        high: a number above ``low`` that is taken to pass.
        passes: function of a number between both; numbers above one that passes are assumed to
            pass, too.
    """
    while high - low > 1:
        middle = (low + high) // 2
        if passes(middle):
            high = middle
        else:
            low = middle
    return high
