"""Result of a search: the candidates, and the best of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from quark_onnx.common.reported import plain
from quark_onnx.common.wording import byte_size, counted
from quark_onnx.config import to_dict
from quark_onnx.page.blocks import (
    Action,
    Block,
    Facts,
    Judgement,
    Reasons,
    Strong,
    Text,
    TitledTable,
)
from quark_onnx.page.reported import Reported
from quark_onnx.report import decibels
from quark_onnx.report.verdict import Verdict
from quark_onnx.search.candidate import Candidate
from quark_onnx.search.drawing import score_plots
from quark_onnx.study.record import pareto_front

if TYPE_CHECKING:
    import optuna

#: Maximum loss in dB for recommending a smaller candidate.
_LOSS = 2.0


@dataclass(frozen=True, repr=False)
class SearchResult(Reported):
    """Result of a search.

    Attributes:
        candidates: candidates by falling score, of equal scores the smaller first; then those that
            are slower than the float model (than the fastest candidate, if that is slower, too),
            then pruned candidates, then failed candidates.
        calibrated: number of calibration samples.
        judged: number of held-out samples for the evaluation.
        left: names of candidates that did not fit into the budget.
        total: number of configurations in the space.
        reached: True if the target was met, or without a target.
        study: Optuna's study, for its plots and its dashboard.
        verdict: verdict on the best candidate on the held-out samples, as ``compare`` gives it;
            None with a metric of the user's, for which no sample is held out, and if the best
            candidate is a record of the journal, which has no model.
    """

    candidates: list[Candidate]
    calibrated: int
    judged: int
    left: list[str]
    total: int
    reached: bool
    study: optuna.Study
    verdict: Verdict | None = None

    @property
    def best(self) -> Candidate:
        """Return the candidate with the highest score among those that are not slow."""
        return self.candidates[0]

    @property
    def front(self) -> list[Candidate]:
        """Return the Pareto front of score, size and runtime, as ``pareto_front`` has it."""
        return pareto_front(self.candidates)

    def score_text(self, candidate: Candidate) -> str:
        """Return the score of a candidate with its unit; a metric of the user's has none."""
        if candidate.score is None:
            return "–"
        # No sample judges for a metric of the user's.
        return (
            f"{decibels(candidate.score)} dB"
            if self.judged
            else f"{candidate.score:.4g}"
        )

    def blocks(self) -> list[Block]:
        """Return the verdict, the candidates and the settings of the best as blocks."""
        best = self.best
        seconds = sum(candidate.seconds for candidate in self.candidates)
        score, of = "SQNR", "of the worst output, or part of one"
        # No sample judges for a metric of the user's.
        if not self.judged:
            score, of = "Score", "by the metric"
        configurations = counted(self.total, "configuration")
        facts = [
            (f"{score} of the best", self.score_text(best), of),
            ("Size of the best", _size(best.bytes), f"of {_span(self.candidates)}"),
            ("Tried", f"{len(self.candidates)}", f"of {configurations}"),
            ("Time", _time(seconds), "quantizing and judging"),
            (
                "Samples",
                f"{self.calibrated} + {self.judged}",
                "for calibration and for judging",
            ),
        ]
        front = self.front
        lines = {
            "samples": [
                f"{self.calibrated} to calibrate on, {self.judged} to judge by"
            ],
        }
        # Failed candidates are listed by reason instead.
        measured = [candidate for candidate in self.candidates if not candidate.error]
        rows = [
            (
                str(rank),
                Strong(candidate.name) if candidate is best else candidate.name,
                self.score_text(candidate),
                _size(candidate.bytes),
                "" if candidate.runtime is None else f"{candidate.runtime:.2f}",
                _time(candidate.seconds),
                _remark(candidate, front),
            )
            for rank, candidate in enumerate(measured, 1)
        ]
        header = ("#", "configuration", score, "size", "runtime, × float", "time", "")
        note = (
            f"{len(self.candidates)} of {configurations}; front: none of the others is better,"
            " and no larger or slower"
        )
        failed = {
            candidate.name: candidate.error
            for candidate in self.candidates
            if candidate.error
        }
        nouns = ("configuration", "configurations")
        return [
            self._judgement(),
            Facts(facts, lines),
            score_plots(self.candidates, front, score),
            TitledTable(
                "Candidates", header, rows, note, "tried"
            ).without_empty_columns(),
            Reasons("Failed", failed, *nouns, "failed"),
            Reasons(
                "Not tried",
                dict.fromkeys(self.left, "did not fit into --budget"),
                *nouns,
                "not tried",
            ),
            Text("Settings of the best", str(best.config), "best"),
        ]

    def _judgement(self) -> Judgement:
        """Return the verdict on the best candidate, and alternatives to it."""
        best = self.best
        if best.score is None:
            return Judgement("poor", "every candidate failed")
        score = self.score_text(best)
        score = f"{score} SQNR" if self.judged else f"a score of {score}"
        sentence = f"{best.name} is best: {score} in {_size(best.bytes)}"
        actions = self._actions()
        if not self.reached:
            return Judgement("poor", f"{sentence}, which misses the target", actions)
        if self.verdict is None:
            return Judgement("unknown", sentence, actions)
        return Judgement(
            self.verdict.band,
            f"{sentence}; {self.verdict.sentence}",
            (*actions, *(step.action for step in self.verdict.next_steps)),
            self.verdict.measured_on,
        )

    def _actions(self) -> tuple[Action, ...]:
        """Return the actions to take a smaller model, and to try the remaining candidates."""
        actions = list[Action]()
        best_score, best_bytes = self.best.score or 0.0, self.best.bytes or 0
        smaller = [
            candidate
            for candidate in self.front
            if (candidate.bytes or 0) < best_bytes
            and best_score - (candidate.score or 0.0) <= _LOSS
        ]
        # A loss in dB says nothing of a metric of the user's.
        if smaller and self.judged:
            smallest = min(smaller, key=lambda candidate: candidate.bytes or 0)
            loss = best_score - (smallest.score or 0.0)
            effect = f"{_size(smallest.bytes)}, {loss:.1f} dB less"
            action = Action(f"take a smaller model: {smallest.name}", effect=effect)
            actions.append(action)
        if self.left:
            count = counted(len(self.left), "configuration")
            actions.append(Action(f"raise --budget: {count} did not fit"))
        return tuple(actions)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        front = self.front
        return {
            "calibrated": self.calibrated,
            "judged": self.judged,
            "left": len(self.left),
            "left_names": self.left,
            "total": self.total,
            "reached": self.reached,
            "verdict": None if self.verdict is None else plain(asdict(self.verdict)),
            "actions": plain([asdict(each) for each in self._judgement().actions]),
            "candidates": [
                # The name comes first, and the settings after it.
                {"name": each.name, "config": None}
                | vars(each)
                | {"config": to_dict(each.config), "pareto": each in front}
                for each in self.candidates
            ],
        }


def _remark(candidate: Candidate, front: Sequence[Candidate]) -> str:
    if candidate.pruned:
        return f"ended early, after {counted(candidate.judged, 'sample')}"
    return "front" if candidate in front else ""


def _span(candidates: Iterable[Candidate]) -> str:
    """Return the range of sizes of all candidates."""
    sizes = [candidate.bytes for candidate in candidates if candidate.bytes is not None]
    if not sizes:
        return "no other"
    return f"{_size(min(sizes))} to {_size(max(sizes))}"


def _size(count: int | None) -> str:
    return "–" if count is None else byte_size(count)


def _time(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s"
