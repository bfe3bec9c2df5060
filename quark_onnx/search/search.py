"""search: the best configuration for a model, by trial.

This module provides the space, the judge and the report. Optuna proposes, prunes and stores the
candidates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isnan
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any

from onnx import ModelProto

from calibrators.base import is_number, is_whole
from calibrators.onnx_runtime.isolation import isolated
from calibrators.onnx_runtime.tensors import model_bytes
from calibrators.readers.open import CalibrationData
from quark_onnx.check.inlined import inlined
from quark_onnx.common.errors import (
    ConfigError,
    ModelError,
    crash_errors,
)
from quark_onnx.common.progress import Progress, Show, showing
from quark_onnx.common.version import __version__
from quark_onnx.config import QConfig
from quark_onnx.config.checks import require
from quark_onnx.engines import selected
from quark_onnx.files.io import load, staged
from quark_onnx.files.overwrites import refuse_overwritten_arguments
from quark_onnx.graph import Graph, gather_constants, model_key
from quark_onnx.job import Result
from quark_onnx.measuring.open_data import reader_for
from quark_onnx.patterns.channel_pairs import Passed, pairs_of
from quark_onnx.planning.nothing_to_quantize import require_something_to_quantize
from quark_onnx.report.verdict import Verdict, check_task
from quark_onnx.running.run import Reference
from quark_onnx.search.candidate import Candidate
from quark_onnx.search.checks import check_budget
from quark_onnx.search.keys import config_key, function_key
from quark_onnx.search.result import SearchResult
from quark_onnx.search.runs import Runs, SplitData
from quark_onnx.search.space import ConfigCombination, Space
from quark_onnx.search.sqnr_score import SqnrScorer
from quark_onnx.study.journal import WARM_SAMPLES, StudyJournal
from quark_onnx.study.record import Record
from quark_onnx.study.study import Study
from quark_onnx.targets.target import is_timed
from quark_onnx.trials.judge import judge_models
from quark_onnx.trials.latency import Latency, measure_latency
from quark_onnx.writing.destination import destination, keeps_weights_beside

logger = logging.getLogger(__name__)

#: The greatest number of samples that judge.
_AT_MOST = 64
#: A ratio of latencies above which a candidate is slow, and ranks after the others.
_SLOW = 1.1
#: Maximum number of successive duplicates from the sampler.
_DUPLICATES = 4
#: Default number of candidates.
TRIALS = 24
#: A finished candidate with its record.
_Finished = tuple[ConfigCombination, Record]


def search(  # noqa: PLR0913
    model: str | Path | ModelProto,
    data: CalibrationData,
    *,
    space: Space | dict[str, Any] | None = None,
    metric: Callable[[ModelProto], float] | None = None,
    target: float | None = None,
    budget: float | None = None,
    trials: int | None = TRIALS,
    journal: str | Path | None = None,
    task: str = "auto",
    progress: Show = False,
    isolate: bool = False,
) -> SearchResult:
    """Try configurations on a model and rank them; requires the extra ``search``.

    The first preset and the recipe for the model come first, then each choice of the space alone,
    in the order of cost and promise. Optuna's TPE sampler then combines the best choices. The best
    candidate is the most accurate one that is not slower than the float model on this machine.
    Failed candidates are part of the result, with the reason.

    Args:
        model: the float model, a path or a ModelProto.
        data: calibration data, as for ``quantize_static``; read once. Without a metric a quarter of
            the samples is held out of calibration, and every candidate is evaluated on them.
        space: the configurations to try; None for the default, see ``Space``.
        metric: function of a quantized model that returns a number, higher is better; None for the
            SQNR of the worst output in dB.
        target: score at which the search stops.
        budget: time limit in seconds. A candidate that is estimated to exceed the limit is not
            started, and a running one is stopped at the limit. The first one always finishes.
        trials: maximum number of candidates; None for the whole space.
        journal: path of a file that stores the measurements, as Optuna's journal storage. A
            repeated search with the file continues where it ended, and several processes with a common file
            share the work.
        task: task of the model, for the verdict, as for ``quantize``.
        progress: as for ``quantize_static``.
        isolate: run onnxruntime in another process, as for ``quantize``. A candidate that crashes it
            has failed, and the search goes on.

    Returns:
        The candidates, best first.

    Raises:
        ConfigError: a setting is wrong, or the file is no journal.
        DataError: the data does not fit the model, or there are fewer than two samples.
        MissingDependency: Optuna is not installed.
        ModelError: the model cannot be loaded or run, no output can be evaluated, or every
            candidate failed.

    >>> from onnx import parser
    >>> dense = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }''')
    >>> samples = ({"x": [[0.1 * i, 1.0 - 0.2 * i]]} for i in range(8))
    >>> found = search(dense, samples, space={"presets": ["A8W8", "A16W8"], "calibrators": [], "optimizers": []})
    >>> [candidate.name for candidate in found.candidates]
    ['A16W8', 'A8W8']
    """  # noqa: E501
    with (
        crash_errors(model),
        isolated(isolate),
        showing(progress) as show,
        Search(
            model,
            data,
            space=space,
            metric=metric,
            target=target,
            budget=budget,
            trials=trials,
            journal=journal,
            task=task,
            progress=show,
        ) as running,
    ):
        return running.run()


class Search:
    """A search with its samples, which are deleted at the end of the ``with``.

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
        task: str = "auto",
        progress: bool | None = False,
    ) -> None:
        check_task(task)
        self._task, self._random = task, False
        self._space = Space.of(space).for_model(model)
        _check_numbers(target, budget, trials)
        _check(metric, journal)
        refuse_overwritten_arguments(
            {"model": model, "data": data, "space": space}, {"journal": journal}
        )
        self._model, self._metric = model, metric
        self._target, self._budget = target, budget
        self._progress = progress
        self._best: tuple[str, ModelProto] | None = None
        self._samples = SplitData()
        self._runs = Runs(model, self._samples.calibration, budget, task)
        original = load(model)
        graph = Graph.of(inlined(original))
        gather_constants(graph)
        require_something_to_quantize(graph, QConfig())
        # Equalization is tried second where SiLU or Relu6 separates layers.
        # SiLU or Relu6, which equalization can pass, separate layers.
        pairs = len(pairs_of(graph, Passed(False, False)))
        has_gates = len(pairs_of(graph, Passed(True, True))) > pairs
        early = "cle" if has_gates else ""
        self._probes, self._others = self._space.order(early)
        self._total = len(self._probes) + len(self._others)
        # Never more than the space has, so that the progress bar reaches its end.
        self._most = self._total if trials is None else min(trials, self._total)
        self._reference = Reference(
            original,
            Path(model) if isinstance(model, str | Path) else None,
        )
        try:
            reader = reader_for(graph, data)
            self._random = reader.random
            # With a metric, all samples calibrate.
            most = 0 if metric else _AT_MOST
            self._samples.read(reader, reader.length, most=most, progress=progress)
            self._scorer = None
            if metric is None:
                self._scorer = SqnrScorer(self._reference, self._samples.judges)
            # All that a record depends on besides the configuration: with another version, model,
            # data or metric, the journal's records are not valid.
            identity = {
                "version": __version__,
                "model": model_key(original),
                "samples": len(self._samples.calibration) + len(self._samples.judges),
                "data": self._samples.key,
                "score": f"metric {function_key(metric)}" if metric else "sqnr",
            }
            engine = selected()
            if engine is not None:
                identity["engine"] = engine.title
            self._journal = StudyJournal(
                None if journal is None else Path(journal),
                identity,
                {axis: list(labels) for axis, labels in self._space.axes.items()},
                self._space.combination,
            )
            self._study = Study(
                self._try, self._journal, fits=self._fits, is_enough=self._is_enough
            )
        # Spools hold files; a failed constructor has no with block that would close them.
        except BaseException:
            self.close()
            raise

    def run(self) -> SearchResult:
        """Run the search; return the candidates, best first.

        Returns:
            The result, with the candidates of other processes that share the journal.

        Raises:
            ModelError: every candidate failed.
            ConfigError: the metric returned no number.
        """
        with Progress(self._progress, self._most, "searching", "candidate") as bar:
            for combination, record in self._study.run(self._proposals()):
                logger.info("%s: %s", combination.name, record.error or record.score)
                bar.update(len(self._study.finished()))
        finished = self._study.finished()
        limit = _slow(finished)
        ranked = sorted(finished, key=lambda pair: _rank(pair, limit))
        # Failed candidates rank last: the first failed, so all did.
        if ranked[0][1].score is None:
            combination, record = finished[0]
            raise ModelError(
                f"every candidate of the search failed; {combination.name}:"
                f" {record.error}",
            )
        candidates = [
            Candidate(**vars(record), name=combination.name, config=combination.config)
            for combination, record in ranked
        ]
        return SearchResult(
            candidates,
            len(self._samples.calibration),
            len(self._samples.judges),
            self._study.untried_names,
            self._total,
            self._target is None or self._study.is_reached(),
            self._journal.optuna,
            self._verdict(candidates[0]),
        )

    def _verdict(self, best: Candidate) -> Verdict | None:
        """Return the verdict on the best candidate.

        None without held-out samples, and for a record of the journal, which has no model.
        """
        is_model_kept = self._best is not None and self._best[0] == config_key(
            best.config
        )
        if not len(self._samples.judges) or not is_model_kept:
            return None
        judged = judge_models(
            self._reference.model,
            self._model_of(best),
            self._samples.judges,
            task=self._task,
            random=self._random,
        )
        if judged.verdict is None:
            return None
        # The other candidates are the next steps, unless the data must change.
        steps = [finding.next_step for finding in judged.findings[:1]]
        return replace(judged.verdict, next_steps=tuple(steps))

    def _model_of(self, candidate: Candidate) -> ModelProto:
        """Return the model of a candidate, quantized again unless it is the best of this run."""
        # Only the best model is kept in memory. Another one is quantized again, on the ranges
        # measured before.
        key = config_key(candidate.config)
        if self._best is None or self._best[0] != key:
            self._best = key, self._runs.quantized(candidate.config).model
        return self._best[1]

    def write(self, candidate: Candidate, output: str | Path) -> None:
        """Write the model of a candidate.

        The model is quantized again unless it is the best of this run.

        Args:
            candidate: the candidate.
            output: path of the model.

        Raises:
            ConfigError: the output may not be written.
            ModelError: the model cannot be written; no partial file is left.
        """
        target = destination(self._model, output)
        assert target is not None
        with staged(
            self._model_of(candidate),
            target,
            external=keeps_weights_beside(self._model, target),
        ):
            pass  # the result was checked and run when it was created

    def close(self) -> None:
        """Delete the samples and their files."""
        self._samples.close()

    def __enter__(self) -> Search:
        return self

    def __exit__(
        self,
        *error: type[BaseException] | BaseException | TracebackType | None,
    ) -> None:
        self.close()

    def _is_enough(self, record: Record) -> bool:
        """Return whether a record meets the target."""
        if self._target is None or record.score is None:
            return False
        return not record.pruned and record.score >= self._target

    def _proposals(self) -> Iterator[ConfigCombination]:
        """Yield candidates: first the probes, then proposals of the sampler.

        The sampler learns from the scores of the probes. After repeated duplicates of it, the other
        combinations come in their order.
        """
        probes = {each.key for each in self._probes}
        duplicates = 0
        # Read again in each round: other processes may add records to the journal.
        while len(finished := self._study.finished()) < self._most:
            # A preset that fails alone also fails with optimizers or calibrators.
            working = {_preset(tried) for tried, record in finished if not record.error}
            broken = {_preset(tried) for tried, _ in finished} - working
            candidate = self._study.first_open(
                combination
                for combination in (*self._probes, *self._others)
                if _preset(combination) not in broken
            )
            if candidate is None:
                return
            if candidate.key not in probes and duplicates < _DUPLICATES:
                candidate = self._journal.propose()
                is_new = self._study.first_open([candidate]) is not None
                # It may equal a configuration tried before, under other choices, or be too slow.
                if _preset(candidate) in broken or not is_new:
                    duplicates += 1
                    continue
            duplicates = 0
            yield candidate

    def _fits(self, combination: ConfigCombination, finished: list[_Finished]) -> bool:
        """Return True if a candidate is estimated to end within the budget.

        Args:
            combination: the candidate.
            finished: the finished candidates with their records; without any the candidate fits.
        """
        # The first candidate always runs.
        if self._budget is None or not finished:
            return True
        return self._runs.has_time(_estimate(combination, finished))

    def _try(self, combination: ConfigCombination) -> Record | None:
        """Quantize and evaluate a candidate; return None if its time ran out.

        Returns:
            The record, also of a failed candidate.
        """
        judged, pruned = 0, False

        def score(result: Result) -> tuple[ModelProto, Any]:
            nonlocal judged, pruned
            if self._scorer is None:
                assert self._metric is not None
                return result.model, self._metric(result.model)
            value, judged, pruned = self._scorer.score(
                result.model, self._journal.report, WARM_SAMPLES
            )
            return result.model, value

        # The first candidate has no limit: a search returns at least one model.
        outcome = self._runs.run(
            combination.config, score, limited=bool(self._study.finished())
        )
        if outcome is None:
            return None
        if outcome.found is None:
            return Record(None, outcome.seconds, None, outcome.error)
        return self._record(
            combination, *outcome.found, outcome.seconds, judged, pruned
        )

    def _record(  # noqa: PLR0913
        self,
        combination: ConfigCombination,
        model: ModelProto,
        score: Any,
        seconds: float,
        judged: int,
        pruned: bool,
    ) -> Record:
        """Return the record of a judged candidate, whose model is kept if it is the best.

        Raises:
            ConfigError: the metric returned no number.
        """
        # numpy's scalars are Real, and float() of them is stored in JSON.
        if not is_number(score, Real):
            raise ConfigError(
                f"the metric returned {score!r}; it must be a number that a float can"
                " hold",
            )
        if isnan(score):
            return Record(None, seconds, None, "the metric is not a number (NaN)")
        size = model_bytes(model)
        latency = None if pruned else self._latency(model)
        record = Record(float(score), seconds, size, "", judged, pruned)
        if latency is not None:
            record = replace(record, runtime=latency.ratio, scatter=latency.scatter)
        finished = self._study.finished()
        limit = _slow([*finished, (combination, record)])
        # Strictly better: of equal candidates the first stays, as in the sorted result.
        if all(
            _rank((combination, record), limit) < _rank(pair, limit)
            for pair in finished
        ):
            self._best = combination.key, model
        return record

    def _latency(self, model: ModelProto) -> Latency | None:
        """Return the latency of a model and of the float model; None if unknown."""
        # The latency on a target is not that on this processor, but that of its engine.
        if selected() is None and not is_timed(self._space.target):
            return None
        try:
            sample = self._samples.calibration[0]
            latency = measure_latency(self._reference.model, model, sample)
        except ModelError:  # the quality is known without it
            return None
        return None if latency.is_overhead else latency


def _preset(combination: ConfigCombination) -> str:
    return combination.choices["preset"]


def _estimate(combination: ConfigCombination, finished: list[_Finished]) -> float:
    """Estimate the runtime of a candidate in seconds from earlier ones.

    Args:
        finished: the finished candidates with their records, at least one.
    """
    alike = [
        record.seconds
        for candidate, record in finished
        if _takes_as_long(candidate, combination)
    ]
    if alike:
        # The longest of equal work: a candidate that is too slow wastes the rest of the budget.
        return max(alike)
    plain = [pair for pair in finished if not pair[0].kinds]  # without optimizers
    closest = plain or finished
    # Seconds of a plain candidate, from the table of relative costs.
    unit = max(
        record.seconds / candidate.relative_cost for candidate, record in closest
    )
    return unit * combination.relative_cost


def _takes_as_long(finished: ConfigCombination, combination: ConfigCombination) -> bool:
    """Return whether a finished and a planned candidate have a similar runtime."""
    # Optimizers have a similar runtime with all presets.
    same_work = bool(combination.kinds) or _preset(finished) == _preset(combination)
    return same_work and finished.kinds == combination.kinds


def _slow(finished: list[_Finished]) -> float:
    """Return the ratio of latencies above which a candidate is slow.

    A processor without fast integers may run every candidate slower than the float model: the
    fastest one is the measure then.
    """
    ratios = [record.runtime for _, record in finished if record.runtime is not None]
    return _SLOW * max(1.0, min(ratios, default=1.0))


def _rank(finished: _Finished, slow: float) -> tuple[bool, bool, bool, float, int]:
    """Return the sort key of a result; equal results keep their order.

    Args:
        finished: a finished candidate with its record.
        slow: ratio of latencies above which a candidate is slow.

    Returns:
        A key that sorts by falling score, then by size. Slow candidates come after the others,
        then those that ended early, and failed ones last.
    """
    record = finished[1]
    return (
        record.score is None,
        record.pruned,
        (record.runtime or 0.0) > slow,
        -(record.score or 0.0),
        record.bytes or 0,
    )


def _check_numbers(target: Any, budget: object, trials: object) -> None:
    """Raise ConfigError for an impossible target, budget or number of trials."""
    require(
        target is None or (is_number(target) and not isnan(target)),
        "target",
        target,
        "a number, the least score that suffices",
    )
    check_budget(budget)
    require(
        trials is None or is_whole(trials, 1),
        "trials",
        trials,
        "a number of candidates, 1 or more",
    )


def _check(metric: object, journal: object) -> None:
    """Raise ConfigError for settings of another type."""
    if metric is not None and not callable(metric):
        raise ConfigError(
            f"metric is {metric!r}; it must take a model and return a number",
        )
    require(
        journal is None or (isinstance(journal, str | Path) and bool(str(journal))),
        "journal",
        journal,
        "a path",
    )
