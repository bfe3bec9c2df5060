"""The search for a preprocessing with more evidence than the given one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from quark_onnx.preprocessing.alternatives import Alternative
from quark_onnx.preprocessing.evidence import Evidence, Labelled
from quark_onnx.preprocessing.finding import Finding

Feeds = Mapping[str, NDArray[Any]]
#: Yields the outputs of the float model on samples.
OutputsOn = Callable[[Iterable[Feeds]], Iterator[Mapping[str, NDArray[Any]]]]
#: An alternative, and the evidence with it.
TriedAlternative = tuple[Alternative, Evidence]

#: Rows after which only the best alternatives are tried further.
FIRST = 8
#: Number of alternatives tried further: where the given preprocessing is weak, and where its
#: evidence is strong, so that only an alternative very like it can be right.
_CONFIRMED, _CONFIRMED_STRONG = 4, 2


@dataclass(frozen=True)
class PreprocessingSearch:
    """The search for a better preprocessing, on more and more samples.

    Attributes:
        given: the evidence with the given preprocessing, on the last number of samples.
        fresh: returns empty evidence.
        run: yields the outputs of the float model on samples.
        counts: numbers of samples after which hopeless alternatives are dropped.
        first: the number of samples after which only the best alternatives are kept.
        rows: number of rows of ``given`` in the first 0, 1, 2, ... samples.
        accept: returns whether an alternative, with more evidence, passes a further test.
    """

    given: Evidence
    fresh: Callable[[], Evidence]
    run: OutputsOn
    counts: Sequence[int]
    first: int
    rows: Sequence[int]
    accept: Callable[[Alternative, Evidence], bool] = lambda alternative, evidence: True

    def finding(self, alternatives: Sequence[Alternative]) -> Finding | None:
        """Return the alternative with significantly more evidence as a finding.

        Args:
            alternatives: the alternatives to try; those with fewer changes first.
        """
        tried = self._tried(alternatives)
        confirmed = [
            trial
            for trial in tried
            if self.given.beaten_by(trial[1]) and self.accept(*trial)
        ]
        if not confirmed:
            return None
        # Labels tell alternatives apart that look alike without them.
        if isinstance(self.given, Labelled):
            other, found = _most_right(confirmed)
            equals: list[Alternative] = []
        else:
            other, found = _simplest(confirmed)
            equals = _equals(other, found, tried)
        evidence = (
            f"the float model finds {self.given}{_with_given(other)}, and {found} with"
            f" {other.name}"
        )
        if equals:
            names = "; ".join(equal.name for equal in equals)
            evidence += f" (as likely: {names}; --labels can tell)"
        # Both orders of channels are as likely: the usual one of the scaling is advised.
        if any(equal.is_twin_of(other) for equal in equals):
            return Finding(
                other.cause, evidence, other.usual_advice, other.usual_options
            )
        return Finding(other.cause, evidence, other.advice, other.options)

    def _tried(self, alternatives: Sequence[Alternative]) -> list[TriedAlternative]:
        """Return the promising alternatives, with the evidence on all samples.

        Args:
            alternatives: the alternatives to try; those with fewer changes first.

        Returns:
            The alternatives that are left after the last stage, the strongest evidence first once
            ``first`` samples are reached.
        """
        tried = self._promising(alternatives, self.counts[0])
        done = self.counts[0]
        for count in self.counts[1:]:
            for alternative, evidence in tried:
                for outputs in self.run(alternative.feeds(done, count)):
                    evidence.add(outputs)
            done = count
            tried = [trial for trial in tried if not self._hopeless(count, trial[1])]
            # Before, chance on a few rows could drop the right alternative.
            if count >= self.first and self.rows[count]:
                tried.sort(key=lambda trial: -trial[1].strength)
                del tried[_CONFIRMED_STRONG if self._strong else _CONFIRMED :]
        return tried

    def _promising(
        self, alternatives: Sequence[Alternative], count: int
    ) -> list[TriedAlternative]:
        """Return the promising alternatives, with the evidence on the first samples.

        The order of channels changes the evidence less than a scaling, so that no order rescues
        a hopeless scaling.

        Args:
            alternatives: the alternatives; a scaling comes before its pair with the other order.
        """
        promising: list[TriedAlternative] = []
        hopeless: list[Alternative] = []
        for alternative in alternatives:
            if any(alternative.is_twin_of(rejected) for rejected in hopeless):
                continue
            evidence = self.fresh()
            for outputs in self.run(alternative.feeds(0, count)):
                evidence.add(outputs)
            if self._hopeless(count, evidence):
                hopeless.append(alternative)
            else:
                promising.append((alternative, evidence))
        return promising

    def _hopeless(self, count: int, evidence: Evidence) -> bool:
        """Return whether an alternative has too little evidence on the first samples."""
        # Rows are compared one by one: an output whose number of rows depends on the values has no
        # counterpart for each.
        if len(evidence) != self.rows[count]:
            return True
        if not len(evidence):
            return False
        given = self.given.head(len(evidence))
        return given.hopeless(evidence) or (self._strong and given.surer_than(evidence))

    @property
    def _strong(self) -> bool:
        """Return whether the given preprocessing has strong evidence on the first samples."""
        first = self.given.head(self.rows[self.first])
        return len(first) > 0 and first.strong


def _most_right(confirmed: Sequence[TriedAlternative]) -> TriedAlternative:
    """Return the trial with the highest top-1, among equals the one with the fewest changes.

    Args:
        confirmed: trials of labelled evidence, at least one.
    """

    def rank(trial: TriedAlternative) -> tuple[float, int, float]:
        other, found = trial
        assert isinstance(found, Labelled)
        return found.top1, -other.changes, found.strength

    return max(confirmed, key=rank)


def _simplest(confirmed: Sequence[TriedAlternative]) -> TriedAlternative:
    """Return the trial with the fewest changes among those as strong as the best."""
    best = max(confirmed, key=lambda trial: trial[1].strength)
    equals = [trial for trial in confirmed if not trial[1].beaten_by(best[1])]
    return min(equals, key=lambda trial: (trial[0].changes, -trial[1].strength))


def _equals(
    best: Alternative, found: Evidence, tried: Sequence[TriedAlternative]
) -> list[Alternative]:
    """Return the other alternatives with evidence as strong as the best's.

    Args:
        tried: all trials on the same rows, with that of ``best``.
    """
    return [
        other
        for other, evidence in tried
        if other is not best
        and not (evidence.beaten_by(found) or found.beaten_by(evidence))
    ]


def _with_given(other: Alternative) -> str:
    scaling = other.pictures.scaling
    return f" with {scaling.name}" if scaling is not None else ""
