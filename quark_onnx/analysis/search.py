"""search: the configuration that serves a model best, found by trying.

The cheap and the promising first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, isnan
from numbers import Real
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

from onnx import ModelProto

from calibrators.base import is_number
from calibrators.onnx_runtime.session import model_bytes, open_session
from calibrators.readers.spool import MEMORY, Spool
from quark_onnx.analysis.search_journal import (
    Record,
    SearchJournal,
    function_key,
    model_key,
)
from quark_onnx.analysis.space import Space, Trial
from quark_onnx.api import quantize
from quark_onnx.config import QConfig, to_dict
from quark_onnx.errors import (
    ConfigError,
    DataError,
    ModelError,
    QuarkError,
    data_errors,
)
from quark_onnx.graph import Graph, inlined
from quark_onnx.graph.io import load, staged
from quark_onnx.progress import Progress
from quark_onnx.refine import sample_key
from quark_onnx.report.measure import least_sqnr, measure
from quark_onnx.steps import Reference, destination, keeps_weights_beside, reader_for
from quark_onnx.version import __version__

logger = logging.getLogger(__name__)

#: One sample in so many judges, the second of each group, and at most so many do in all.
_EVERY, _AT_MOST = 4, 64


@dataclass(frozen=True)
class Candidate:
    """A configuration that was tried.

    Attributes:
        name: the preset, and what was changed of it.
        config: the configuration itself.
        score: the user's metric, or the SQNR in dB of the worst output on the samples held out;
            None if it failed.
        seconds: how long quantizing and judging took.
        bytes: the size of the quantized model; None if it failed.
        error: why it failed; empty if it did not.
    """

    name: str
    config: QConfig
    score: float | None
    seconds: float
    bytes: int | None
    error: str = ""


@dataclass(frozen=True)
class SearchResult:
    """What a search has found.

    Attributes:
        candidates: what was tried, the best first; of equal scores the smaller; those that failed
        at the end. calibrated, judged: the numbers of samples for the one and the other; none is
        for both. left: how many candidates did not fit into the budget. reached: whether the target
        was met; True without a target.
    """

    candidates: list[Candidate]
    calibrated: int
    judged: int
    left: int
    reached: bool

    @property
    def best(self) -> Candidate:
        """The candidate with the highest score."""
        return self.candidates[0]

    @property
    def front(self) -> list[Candidate]:
        """The Pareto front of size and score: those that none beats in one of the two without
        losing in the other.
        """
        front = list[Candidate]()
        for candidate in self.candidates:  # in falling order of scores
            if candidate.bytes is not None and all(
                candidate.bytes < (each.bytes or 0) for each in front
            ):
                front.append(candidate)
        return front

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        front = self.front
        return {
            "calibrated": self.calibrated,
            "judged": self.judged,
            "left": self.left,
            "reached": self.reached,
            "candidates": [
                {**vars(each), "config": to_dict(each.config), "pareto": each in front}
                for each in self.candidates
            ],
        }


def search(  # noqa: PLR0913
    model: str | Path | ModelProto,
    data: Any,
    *,
    space: Space | dict[str, Any] | None = None,
    metric: Callable[[ModelProto], float] | None = None,
    target: float | None = None,
    budget: float | None = None,
    journal: str | Path | None = None,
    progress: bool | None = False,
) -> SearchResult:
    """Try configurations on a model and rank them.

    First the presets run as they are; then, on the best of them, other calibrators, and optimizers
    on top of the best calibrator. What fails is part of the result, with the reason.

    Args:
        model: the float model, a path or a ModelProto.
        data: anything that ``quantize_static`` takes as data; it is read once. Without a metric a
            quarter of the samples is held out: nothing is calibrated on them, and every candidate
            is judged by them.
        space: what may be tried; None for the default, see ``Space``.
        metric: takes a quantized model and returns a number, the higher the better; None for the
            SQNR of the worst output in dB.
        target: stop as soon as a score is at least this.
        budget: seconds. A candidate that has begun is finished; one that would not fit, as far as
            can be told from those before it, is not begun. The first one always is.
        journal: a file that keeps what was measured; a search that is begun again with it goes on
            where it ended.
        progress: as for ``quantize_static``.

    Raises:
        ConfigError: a setting is wrong, or the journal belongs to something else.
        DataError: the data does not fit the model, or there are fewer than two samples.
        ModelError: the model cannot be loaded or run, no output can be judged, or every candidate
            failed.

    >>> from onnx import parser
    >>> dense = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }''')
    >>> samples = ({"x": [[0.1 * i, 1.0 - 0.2 * i]]} for i in range(8))
    >>> found = search(dense, samples, space={"presets": ["A8W8", "A16W8"], "calibrators": [], "optimizers": []})
    >>> [candidate.name for candidate in found.candidates]
    ['A16W8', 'A8W8']
    """  # noqa: E501
    with Search(
        model,
        data,
        space=space,
        metric=metric,
        target=target,
        budget=budget,
        journal=journal,
        progress=progress,
    ) as running:
        return running.run()


class Search:
    """A search with its samples, as long as the ``with`` lasts.

    The arguments are those of ``search``.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: str | Path | ModelProto,
        data: Any,
        *,
        space: Space | dict[str, Any] | None = None,
        metric: Callable[[ModelProto], float] | None = None,
        target: float | None = None,
        budget: float | None = None,
        journal: str | Path | None = None,
        progress: bool | None = False,
    ) -> None:
        self._start = perf_counter()
        self._space = Space.of(space)
        _check(metric, target, budget, journal, progress)
        self._model, self._metric, self._target, self._budget = (
            model,
            metric,
            target,
            budget,
        )
        self._progress, self._data = progress, ""
        self._best: tuple[QConfig, ModelProto] | None = None
        original = load(model)
        self._reference = Reference(
            original,
            Path(model) if isinstance(model, str | Path) else None,
        )
        self._calibration, self._judges = (
            Spool(memory=MEMORY // 2),
            Spool(memory=MEMORY // 2),
        )
        try:
            self._read(original, data)
            identity = {
                "version": __version__,
                "model": model_key(original),
                "samples": len(self._calibration) + len(self._judges),
                "data": self._data,
                "score": "sqnr" if metric is None else f"metric {function_key(metric)}",
            }
            self._journal = SearchJournal(
                None if journal is None else Path(journal),
                identity,
            )
            self._found: list[tuple[Trial, Record]] = []
        except BaseException:
            self.close()
            raise

    def run(self) -> SearchResult:
        """Try one candidate after the other."""
        left, reached = 0, self._target is None
        with Progress(
            self._progress,
            self._space.most,
            "searching",
            "candidate",
        ) as bar:
            for done, trial in enumerate(self._trials(), 1):
                record = self._journal.find(trial.config)
                if record is None and not self._fits(trial):
                    left += 1
                    continue
                if record is None:
                    record = self._measured(trial)
                    self._journal.keep(trial.name, trial.config, record)
                self._found.append((trial, record))
                bar.update(done)
                logger.info("%s: %s", trial.name, record.error or record.score)
                if (
                    self._target is not None
                    and record.score is not None
                    and record.score >= self._target
                ):
                    reached = True
                    break
        ranked = sorted(self._found, key=_rank)
        candidates = [
            Candidate(trial.name, trial.config, **vars(record))
            for trial, record in ranked
        ]
        if candidates[0].score is None:
            first = self._found[0]
            raise ModelError(
                f"every candidate of the search failed; {first[0].name}:"
                f" {first[1].error}",
            )
        return SearchResult(
            candidates,
            len(self._calibration),
            len(self._judges),
            left,
            reached,
        )

    def write(self, candidate: Candidate, output: str | Path) -> None:
        """Write the model of a candidate, which is quantized anew unless it is the best one of this
        run.

        Raises:
            ConfigError: the output may not be written.
            ModelError: it cannot be written; nothing is left behind.
        """
        if self._best is None or self._best[0] != candidate.config:
            quantize(self._model, self._calibration, candidate.config, output)
            return
        target = destination(self._model, output)
        assert target is not None
        with staged(
            self._best[1],
            target,
            external=keeps_weights_beside(self._model, target),
        ):
            pass  # it was checked, loaded and run when it was made

    def close(self) -> None:
        """Forget the samples, and remove their files."""
        self._calibration.close()
        self._judges.close()

    def __enter__(self) -> Search:
        return self

    def __exit__(
        self,
        *error: type[BaseException] | BaseException | TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, original: ModelProto, data: Any) -> None:
        """Read the data once, and see that outputs can be judged by what is held out."""
        reader = reader_for(Graph.of(inlined(original)), data)
        with (
            data_errors(),
            Progress(self._progress, reader.length, "reading", "sample") as bar,
        ):
            for index, sample in enumerate(reader):
                held = (
                    self._metric is None
                    and index % _EVERY == 1
                    and len(self._judges) < _AT_MOST
                )
                (self._judges if held else self._calibration).append(sample)
                self._data = sample_key(sample, self._data)
                bar.update(index + 1)
        if self._metric is not None:
            return
        if not len(self._judges):
            raise DataError(
                "a search needs at least two samples, one to calibrate on and another"
                " to judge by; the data has one",
            )
        outputs = self._reference.outputs(self._judges[0])
        if self._sqnr(self._reference.session) is None:
            names = ", ".join(outputs)
            raise ModelError(
                f"no output ({names}) is float and repeatable, so none has an SQNR;"
                " give a metric",
            )

    def _trials(self) -> Iterator[Trial]:
        """The presets, then variations of the best, each once.

        What comes next depends on the scores so far.
        """
        seen = list[QConfig]()
        yield from self._unseen(iter(self._space.trials()), seen)
        for changes in self._space.stages():
            leaders = self._leaders()
            yield from self._unseen(
                (change(leader) for change in changes for leader in leaders),
                seen,
            )

    @staticmethod
    def _unseen(trials: Iterator[Trial], seen: list[QConfig]) -> Iterator[Trial]:
        for trial in trials:
            if trial.config not in seen:
                seen.append(trial.config)
                yield trial

    def _leaders(self) -> list[Trial]:
        """The best trial of each of the best presets."""
        leaders = dict[int, Trial]()
        for trial, record in sorted(self._found, key=_rank):
            if record.score is not None:
                leaders.setdefault(trial.origin, trial)
        return list(leaders.values())[: self._space.refine]

    def _fits(self, trial: Trial) -> bool:
        """Whether a trial is likely to end within the budget."""
        if self._budget is None or not self._found:
            return True
        taken = [
            (each, record.seconds)
            for each, record in self._found
            if each.kinds <= trial.kinds
        ]
        # what optimizers cost is much the same for all presets, the rest is not
        alike = [
            seconds
            for each, seconds in taken
            if each.origin == trial.origin or each.kinds
        ]
        estimate = max(alike or [seconds for _, seconds in taken], default=0.0)
        return perf_counter() - self._start + estimate < self._budget

    def _measured(self, trial: Trial) -> Record:
        start = perf_counter()
        try:
            model = quantize(self._model, self._calibration, trial.config).model
            score = self._judged(model) if self._metric is None else self._metric(model)
        except QuarkError as error:
            return Record(
                None,
                perf_counter() - start,
                None,
                " ".join(str(error).split()),
            )
        if not is_number(score, Real):
            raise ConfigError(
                f"the metric returned {score!r}; it must be a number that a float can"
                " hold",
            )
        if isnan(score):
            return Record(
                None,
                perf_counter() - start,
                None,
                "the metric is not a number (NaN)",
            )
        record = Record(float(score), perf_counter() - start, model_bytes(model))
        if all(_rank((trial, record)) < _rank(each) for each in self._found):
            self._best = trial.config, model
        return record

    def _judged(self, model: ModelProto) -> float:
        try:
            found = self._sqnr(open_session(model, what="the quantized model"))
        except Exception as error:  # onnxruntime raises several unrelated types
            raise ModelError(
                f"the quantized model cannot be judged: {error}",
            ) from error
        return float("-inf") if found is None else found

    def _sqnr(self, session: Any) -> float | None:
        """The SQNR of the worst output on the samples held out; None if no output has one."""
        errors = measure(self._reference.session, session, self._judges)
        return least_sqnr(errors, None)


def _rank(found: tuple[Trial, Record]) -> tuple[bool, float, int]:
    """What results are sorted by.

    Of those that are equal the one that was tried first comes first.
    """
    record = found[1]
    return record.score is None, -(record.score or 0.0), record.bytes or 0


def _check(
    metric: object,
    target: object,
    budget: object,
    journal: object,
    progress: object,
) -> None:
    if metric is not None and not callable(metric):
        raise ConfigError(
            f"metric is {metric!r}; it must take a model and return a number",
        )
    if target is not None and not (is_number(target) and not isnan(target)):  # type: ignore[arg-type]
        raise ConfigError(
            f"target is {target!r}; it must be a number, the least score that suffices",
        )
    if budget is not None and not (is_number(budget) and 0 < budget < inf):  # type: ignore[operator]
        raise ConfigError(
            f"budget is {budget!r}; it must be a number of seconds above 0",
        )
    if journal is not None and not (isinstance(journal, str | Path) and str(journal)):
        raise ConfigError(f"journal is {journal!r}; it must be a path")
    if progress not in (True, False, None):
        raise ConfigError(
            f"progress is {progress!r}; it must be True, False, or None for a terminal"
            " only",
        )
