"""search: find the configuration that serves a model best, by trying.

The space, the judge and the report are here; Optuna proposes, prunes and keeps the candidates.
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
from typing import TYPE_CHECKING, Any

from onnx import ModelProto

from calibrators.base import is_number
from calibrators.onnx_runtime.session import model_bytes
from calibrators.readers.spool import MEMORY, Spool
from quark_onnx.analysis.judge import Judge
from quark_onnx.analysis.keys import config_key, function_key
from quark_onnx.analysis.space import Space, Trial
from quark_onnx.analysis.study import WARM_SAMPLES, Asked, Record, Study
from quark_onnx.api import quantize
from quark_onnx.config import QConfig, to_dict
from quark_onnx.errors import (
    ConfigError,
    DataError,
    ModelError,
    QuarkError,
    TimeLimitError,
    data_errors,
)
from quark_onnx.graph import Graph, gather_constants, inlined, model_key
from quark_onnx.graph.io import load, staged
from quark_onnx.patterns.channel_pairs import Passed, pairs_of
from quark_onnx.progress import Progress, time_limit
from quark_onnx.refine import sample_key
from quark_onnx.steps import (
    Calibration,
    Reference,
    destination,
    keeps_weights_beside,
    reader_for,
)
from quark_onnx.version import __version__

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger(__name__)

#: One sample in so many judges, the second of each group, and at most so many do in all.
_EVERY, _AT_MOST = 4, 64
#: A candidate may take this share of the budget.
_SHARE = 0.25
#: So many proposals of the sampler in a row may be known already.
_DUPLICATES = 4
#: So many candidates are tried unless the user says otherwise.
TRIALS = 24


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
        judged: on how many samples it was judged; 0 with a metric of the user's.
        pruned: the judging was ended early, as the score was below the median of the others.
    """

    name: str
    config: QConfig
    score: float | None
    seconds: float
    bytes: int | None
    error: str = ""
    judged: int = 0
    pruned: bool = False


@dataclass(frozen=True)
class SearchResult:
    """What a search has found.

    Attributes:
        candidates: what was tried, the best first; of equal scores the smaller; then those whose
            judging ended early, and those that failed.
        calibrated: the number of samples that candidates were calibrated on.
        judged: the number of samples that they were judged on; no sample is for both.
        left: the names of candidates that did not fit into the budget.
        total: how many configurations the space has.
        reached: whether the target was met; True without a target.
        study: Optuna's study, for its plots and its dashboard.
    """

    candidates: list[Candidate]
    calibrated: int
    judged: int
    left: list[str]
    total: int
    reached: bool
    study: optuna.Study

    @property
    def best(self) -> Candidate:
        """The candidate with the highest score."""
        return self.candidates[0]

    @property
    def front(self) -> list[Candidate]:
        """The Pareto front of size and score.

        It has the candidates that none beats in one of the two without losing in the other.
        """
        front = list[Candidate]()
        for candidate in self.candidates:  # in falling order of scores
            if candidate.bytes is None or candidate.pruned:
                continue
            if all(candidate.bytes < (each.bytes or 0) for each in front):
                front.append(candidate)
        return front

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain values."""
        front = self.front
        return {
            "calibrated": self.calibrated,
            "judged": self.judged,
            "left": len(self.left),
            "left_names": self.left,
            "total": self.total,
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
    trials: int | None = TRIALS,
    journal: str | Path | None = None,
    progress: bool | None = False,
) -> SearchResult:
    """Try configurations on a model and rank them. It needs the extra ``search`` (Optuna).

    First each choice of the space is tried alone, the cheap and the promising first; then Optuna's
    TPE sampler combines those that served best. What fails is part of the result, with the reason.

    Args:
        model: the float model, a path or a ModelProto.
        data: anything that ``quantize_static`` takes as data; it is read once. Without a metric a
            quarter of the samples is held out: nothing is calibrated on them, and every candidate
            is judged by them.
        space: what may be tried; None for the default, see ``Space``.
        metric: takes a quantized model and returns a number, the higher the better; None for the
            SQNR of the worst output in dB.
        target: stop as soon as a score is at least this.
        budget: seconds. A candidate that would not fit, as far as can be told from those before it,
            is not begun, and one that takes more than a quarter of the budget is ended. The first
            one is always finished.
        trials: how many candidates are tried; None for the whole space.
        journal: a file that keeps what was measured, as Optuna's journal storage; a search that is
            begun again with it goes on where it ended, and several processes that are given the
            same one share the work.
        progress: as for ``quantize_static``.

    Raises:
        ConfigError: a setting is wrong, or the file is no journal.
        DataError: the data does not fit the model, or there are fewer than two samples.
        MissingDependency: Optuna is not installed.
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
        trials=trials,
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
        trials: int | None = TRIALS,
        journal: str | Path | None = None,
        progress: bool | None = False,
    ) -> None:
        self._start = perf_counter()
        self._space = Space.of(space)
        _check_numbers(target, budget, trials)
        _check(metric, journal, progress)
        self._model, self._metric = model, metric
        self._target, self._budget = target, budget
        self._progress = progress
        self._best: tuple[str, ModelProto] | None = None
        self._ranges = Calibration("")
        original = load(model)
        graph = Graph.of(inlined(original))
        gather_constants(graph)
        early = "cle" if _has_gates(graph) else ""
        self._probes, self._others = self._space.order(early)
        self._total = len(self._probes) + len(self._others)
        self._most = self._total if trials is None else min(trials, self._total)
        self._left: dict[str, Trial] = {}
        self._reference = Reference(
            original,
            Path(model) if isinstance(model, str | Path) else None,
        )
        self._calibration = Spool(memory=MEMORY // 2)
        self._judges = Spool(memory=MEMORY // 2)
        try:
            data_key = self._read(graph, data)
            self._judge = None if metric else Judge(self._reference, self._judges)
            identity = {
                "version": __version__,
                "model": model_key(original),
                "samples": len(self._calibration) + len(self._judges),
                "data": data_key,
                "score": f"metric {function_key(metric)}" if metric else "sqnr",
            }
            self._study = Study(
                None if journal is None else Path(journal),
                identity,
                {axis: list(labels) for axis, labels in self._space.axes.items()},
            )
        except BaseException:
            self.close()
            raise

    def run(self) -> SearchResult:
        """Try one candidate after the other."""
        with Progress(self._progress, self._most, "searching", "candidate") as bar:
            for asked in self._candidates():
                record = self._study.known(asked.trial) or self._try(asked)
                if record is not None:
                    asked.keep(record)
                    logger.info(
                        "%s: %s", asked.trial.name, record.error or record.score
                    )
                bar.update(len(self._found()))
        ranked = sorted(self._found(), key=_rank)
        if ranked[0][1].score is None:
            trial, record = self._found()[0]
            raise ModelError(
                f"every candidate of the search failed; {trial.name}: {record.error}",
            )
        return SearchResult(
            [
                Candidate(trial.name, trial.config, **vars(record))
                for trial, record in ranked
            ],
            len(self._calibration),
            len(self._judges),
            [trial.name for trial in self._left.values()],
            self._total,
            self._target is None or self._is_reached(),
            self._study.optuna,
        )

    def write(self, candidate: Candidate, output: str | Path) -> None:
        """Write the model of a candidate.

        It is quantized anew unless it is the best one of this run.

        Raises:
            ConfigError: the output may not be written.
            ModelError: it cannot be written; nothing is left behind.
        """
        if self._best is None or self._best[0] != config_key(candidate.config):
            quantize(
                self._model,
                self._calibration,
                candidate.config,
                output,
                ranges=self._ranges,
            )
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

    def _read(self, graph: Graph, data: Any) -> str:
        """Read the data once, hold samples out, and return the key of the data.

        Raises:
            DataError: a sample does not fit, or there are too few.
        """
        reader = reader_for(graph, data)
        key = ""
        with (
            data_errors(),
            Progress(self._progress, reader.length, "reading", "sample") as bar,
        ):
            for index, sample in enumerate(reader):
                wanted = self._metric is None and len(self._judges) < _AT_MOST
                held_out = wanted and index % _EVERY == 1
                (self._judges if held_out else self._calibration).append(sample)
                key = sample_key(sample, key)
                bar.update(index + 1)
        if self._metric is None and not len(self._judges):
            raise DataError(
                "a search needs at least two samples, one to calibrate on and another"
                " to judge by; the data has one",
            )
        return key

    def _found(self) -> list[tuple[Trial, Record]]:
        """Return all candidates with their records, those of other processes included."""
        return [
            (self._space.trial(choices), record)
            for choices, record in self._study.finished()
        ]

    def _is_reached(self) -> bool:
        """Return whether a candidate meets the target."""
        return self._target is not None and any(
            record.score is not None
            and record.score >= self._target
            and not record.pruned
            for _, record in self._found()
        )

    def _candidates(self) -> Iterator[Asked]:
        """Return one candidate after the other, until the end of the search."""
        duplicates = 0
        while True:
            found = self._found()
            if self._is_reached() or len(found) >= self._most:
                return
            done = self._done(found)
            probe = self._next(self._probes, done, found)
            other = None if probe else self._next(self._others, done, found)
            if probe is None and other is None:
                return
            sampled = probe is None and duplicates < _DUPLICATES
            asked = self._study.ask(
                None if sampled else probe or other,
                self._space.trial,
            )
            key = config_key(asked.trial.config)
            if key in done or not self._fits(asked.trial, found):
                duplicates += 1
                if key not in done:
                    self._left[key] = asked.trial
                asked.drop()
                continue
            duplicates = 0
            yield asked

    def _done(self, found: list[tuple[Trial, Record]]) -> set[str]:
        """Return the keys of configurations that are not to be tried any more."""
        done = {config_key(trial.config) for trial, _ in found}
        done.update(self._study.running(), self._left)
        # a preset that fails as it is fails with anything added to it
        working = {_preset(trial) for trial, record in found if not record.error}
        broken = {_preset(trial) for trial, _ in found} - working
        for trial in (*self._probes, *self._others):
            if _preset(trial) in broken:
                done.add(config_key(trial.config))
        return done

    def _next(
        self,
        trials: list[Trial],
        done: set[str],
        found: list[tuple[Trial, Record]],
    ) -> Trial | None:
        """Return the first that is not done and fits; those before it that do not are noted."""
        for trial in trials:
            key = config_key(trial.config)
            if key in done:
                continue
            if self._fits(trial, found):
                return trial
            self._left[key] = trial
        return None

    def _fits(self, trial: Trial, found: list[tuple[Trial, Record]]) -> bool:
        """Return whether a trial is likely to end within the budget."""
        if self._budget is None or not found or self._study.known(trial) is not None:
            return True
        return self._elapsed() + _estimate(trial, found) < self._budget

    def _elapsed(self) -> float:
        return perf_counter() - self._start

    def _try(self, asked: Asked) -> Record | None:
        """Quantize and judge; None if its time was over before anything was measured."""
        start = perf_counter()
        limit = None
        if self._budget is not None and self._found():
            remaining = max(self._budget - self._elapsed(), 0.0)
            limit = min(_SHARE * self._budget, remaining)
        try:
            with time_limit(limit):
                return self._measured(asked, start)
        except TimeLimitError:
            name = f"{asked.trial.name} (ended after {perf_counter() - start:.0f} s)"
            trial = Trial(name, asked.trial.config, asked.trial.choices)
            self._left[config_key(trial.config)] = trial
            asked.drop()
            return None
        except BaseException:
            asked.drop()
            raise

    def _measured(self, asked: Asked, start: float) -> Record:
        judged, pruned = 0, False
        try:
            config = asked.trial.config
            model = quantize(
                self._model,
                self._calibration,
                config,
                ranges=self._ranges,
            ).model
            if self._judge is None:
                assert self._metric is not None
                score = self._metric(model)
            else:
                score, judged, pruned = self._judge.score(
                    model,
                    asked.report,
                    WARM_SAMPLES,
                )
        except TimeLimitError:
            raise
        except QuarkError as error:
            text = " ".join(str(error).split())
            return Record(None, perf_counter() - start, None, text)
        if not is_number(score, Real):
            raise ConfigError(
                f"the metric returned {score!r}; it must be a number that a float can"
                " hold",
            )
        seconds = perf_counter() - start
        if isnan(score):
            return Record(None, seconds, None, "the metric is not a number (NaN)")
        size = model_bytes(model)
        record = Record(float(score), seconds, size, "", judged, pruned)
        if all(_rank((asked.trial, record)) < _rank(each) for each in self._found()):
            self._best = config_key(asked.trial.config), model
        return record


def _has_gates(graph: Graph) -> bool:
    """Return whether layers are separated by SiLU or Relu6, which equalization can pass."""
    return len(pairs_of(graph, Passed(True, True))) > len(
        pairs_of(graph, Passed(False, False)),
    )


def _preset(trial: Trial) -> str:
    return dict(trial.choices)["preset"]


def _estimate(trial: Trial, found: list[tuple[Trial, Record]]) -> float:
    """Return the seconds that a trial will take, by those before it."""
    preset = _preset(trial)
    groups = (
        [each for each in found if _preset(each[0]) == preset and not each[0].kinds],
        [each for each in found if not each[0].kinds],
        found,
    )
    known = next(group for group in groups if group)
    plain = max(record.seconds / other.relative_cost for other, record in known)
    # what optimizers cost is much the same for all presets
    alike = [
        record.seconds
        for other, record in found
        if other.kinds == trial.kinds and (other.kinds or _preset(other) == preset)
    ]
    return max(alike, default=plain * trial.relative_cost)


def _rank(found: tuple[Trial, Record]) -> tuple[bool, bool, float, int]:
    """Return what results are sorted by.

    Of those that are equal the one that was tried first comes first.
    """
    record = found[1]
    return (
        record.score is None,
        record.pruned,
        -(record.score or 0.0),
        record.bytes or 0,
    )


def _check_numbers(target: object, budget: object, trials: object) -> None:
    if target is not None and not (is_number(target) and not isnan(target)):  # type: ignore[arg-type]
        raise ConfigError(
            f"target is {target!r}; it must be a number, the least score that suffices",
        )
    if budget is not None and not (is_number(budget) and 0 < budget < inf):  # type: ignore[operator]
        raise ConfigError(
            f"budget is {budget!r}; it must be a number of seconds above 0",
        )
    if trials is not None and (type(trials) is not int or trials < 1):
        raise ConfigError(
            f"trials is {trials!r}; it must be a number of candidates, 1 or more",
        )


def _check(metric: object, journal: object, progress: object) -> None:
    if metric is not None and not callable(metric):
        raise ConfigError(
            f"metric is {metric!r}; it must take a model and return a number",
        )
    if journal is not None and not (isinstance(journal, str | Path) and str(journal)):
        raise ConfigError(f"journal is {journal!r}; it must be a path")
    if progress not in (True, False, None):
        raise ConfigError(
            f"progress is {progress!r}; it must be True, False, or None for a terminal"
            " only",
        )
