"""calibrate: one streaming sweep over the data.

The statistic of each tensor whose scale must be measured.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from onnx import ModelProto

from calibrators import Extremes, Histogram, Statistic
from calibrators.onnx_runtime.control_flow import Observation, Scope
from calibrators.onnx_runtime.runner import Progress, collect
from quark_onnx.errors import data_errors
from quark_onnx.graph import Graph
from quark_onnx.plan import Plan, Quantize, Use
from quark_onnx.steps import bounded
from quark_onnx.steps.calibration import Keyed
from quark_onnx.steps.run import Sample
from quark_onnx.steps.subgraph_plans import SubgraphPlan, controls, shapeless

#: What was measured of each use.
Ranges = dict[Use, Statistic]

#: Statistics that merge to what would have been found in all values, whatever their order.
_EXACT = (Extremes, Histogram)
_ZERO = "it was zero throughout calibration: there is no range to measure"
#: One sample in so many is held out, from the middle of each stretch, and at most so many in all.
_EVERY, _AT_MOST = 20, 4
#: From this sample on, one in so many is held out for the verdict alone.
_MANY, _EVERY_LATE = 100, 10
#: Samples that the verdict runs on beyond those that every step measures on, and the bytes of
#: their arrays.
_VERDICT_SAMPLES, _VERDICT_BYTES = 28, 1 << 26
#: Of a recurrent model, one sample in so many, all of them from one stretch, and at most so many.
_RUN_EVERY, _RUN_AT_MOST = 5, 32


def calibrate(  # noqa: PLR0913
    graph: Graph,
    plan: Plan,
    samples: Iterable[Sample],
    insides: Sequence[SubgraphPlan] = (),
    *,
    keyed: Keyed | None = None,
    others: Sequence[Plan] = (),
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Ranges:
    """Run the float graph over the samples once.

    Tensors that prove unfit are kept float in ``plan``, with the reason.

    Args:
        insides: bodies of the graph's nodes; they get ranges of their own.
        keyed: what was measured before, which is not measured again; what is measured now is added,
            as statistics that serve every calibrator.
        others: plans of the same graph whose tensors are measured as well, for ``keyed`` alone.

    Raises:
        DataError: a sample that does not fit or cannot be run.
    """
    wanted = _wanted(graph, plan)
    known = {} if keyed is None else keyed.known(wanted)
    watched = _watched(graph, wanted, known)
    if keyed is not None:
        for other in others:
            watched += _watched(graph, _wanted(graph, other), known)
        watched = keyed.richer(watched)
        samples = keyed.counted(samples)
    scope = _scope(ModelProto(), watched, insides)
    with data_errors():
        if known and not any(True for _ in scope.flat()):
            found = _read_through(samples)
        else:
            found = collect(
                graph.to_model,
                scope.observations,
                samples,
                controls=scope.controls,
                executor=executor,
                progress=progress,
            )
    if keyed is not None:
        keyed.keep(watched, found[: len(watched)])
        known, found = keyed.known(wanted), found[len(watched) :]
    return _ranges(graph, plan, insides, iter(found), known)


def _read_through(samples: Iterable[Sample]) -> list[Statistic]:
    """Read all samples, of which some are held out on the way, and measure nothing."""
    for _ in samples:
        pass
    return []


def calibrate_each(
    graph: Graph,
    plans: Sequence[Plan],
    samples: Iterable[Sample],
    progress: Progress | None = None,
    *,
    keyed: Keyed | None = None,
) -> list[Ranges]:
    """Return the ranges of several plans of one graph, from a single run over the samples.

    Bodies are not looked into.

    Args:
        keyed: as for ``calibrate``.

    Raises:
        DataError: a sample that does not fit or cannot be run.
    """
    wanted = [_wanted(graph, plan) for plan in plans]
    every = list(dict.fromkeys(each for group in wanted for each in group))
    known = {} if keyed is None else keyed.known(every)
    watched = list(
        dict.fromkeys(
            each for group in wanted for each in _watched(graph, group, known)
        ),
    )
    if keyed is not None:
        watched = keyed.richer(watched)
    found = list[Statistic]()
    if watched:
        with data_errors():
            found = collect(graph.to_model, watched, samples, progress=progress)
    if keyed is not None:
        keyed.keep(watched, found)
        known = keyed.known(every)
    else:
        known = dict(zip(watched, found, strict=True))
    return [_ranges(graph, plan, (), iter(()), known) for plan in plans]


def missing(graph: Graph, plan: Plan, keyed: Keyed) -> list[Observation]:
    """Return what would have to be measured, as no statistic of it is known."""
    wanted = _wanted(graph, plan)
    return _watched(graph, wanted, keyed.known(wanted))


def _scope(
    model: ModelProto,
    watched: Sequence[Observation],
    insides: Sequence[SubgraphPlan],
    borrowed: frozenset[str] = frozenset(),
) -> Scope:
    """What is to be watched in a graph and in the bodies in it."""
    scopes = [
        _scope(
            shapeless(i),
            _watched(i.graph, _wanted(i.graph, i.plan)),
            i.insides,
            i.body.borrowed,
        )
        for i in insides
    ]
    inputs = frozenset(value.name for value in model.graph.input)
    return Scope(model, tuple(watched), controls(insides, scopes), borrowed & inputs)


def _wanted(graph: Graph, plan: Plan) -> dict[Observation, list[Use]]:
    """What is to be known of tensors, and for which uses."""
    wanted: dict[Observation, list[Use]] = {}
    for use, entry in plan.entries.items():
        if isinstance(entry, Quantize) and _measured(graph, use, entry):
            calibrator = (
                entry.spec.calibrator
                if entry.bounds is None
                else bounded.calibrator_for(entry.spec)
            )
            wanted.setdefault(
                Observation(use.tensor, calibrator, entry.axis),
                [],
            ).append(use)
    return wanted


def _watched(
    graph: Graph,
    wanted: Collection[Observation],
    known: Collection[Observation] = (),
) -> list[Observation]:
    """Return what is to be watched of that, less what is known.

    A join of tensors that are watched holds nothing but their values.
    """
    return [
        observation
        for observation in wanted
        if observation not in known and not _parts(graph, observation, wanted)
    ]


def _parts(
    graph: Graph,
    observation: Observation,
    wanted: Collection[Observation],
) -> list[Observation]:
    """Observations whose statistics merge exactly to that of this one.

    None if it is to be watched itself.
    """
    node = graph.producer(observation.tensor)
    exact = type(observation.calibrator.statistic()) in _EXACT
    if (
        node is None
        or node.kind != "Concat"
        or observation.axis is not None
        or not exact
    ):
        return []
    parts = [replace(observation, tensor=name) for name in node.inputs]
    return parts if all(part in wanted for part in parts) else []


def _statistics(
    graph: Graph,
    wanted: Collection[Observation],
    found: Iterator[Statistic],
    before: Mapping[Observation, Statistic],
) -> dict[Observation, Statistic]:
    """What is known of each, from what was found of those that were watched, and before."""
    known = dict(before)
    for observation in _watched(graph, wanted, before):
        known[observation] = next(found)
    todo = [observation for observation in wanted if observation not in known]
    while todo:
        observation = todo.pop()
        parts = _parts(graph, observation, wanted)
        if missing := [part for part in parts if part not in known]:
            todo += [observation, *missing]
            continue
        known[observation] = observation.calibrator.statistic()
        for part in parts:
            known[observation].merge(known[part])
    return known


def unmeasured(graph: Graph, plan: Plan) -> bool:
    """Whether there are tensors whose range only data can tell."""
    return bool(_wanted(graph, plan))


def _ranges(
    graph: Graph,
    plan: Plan,
    insides: Sequence[SubgraphPlan],
    found: Iterator[Statistic],
    known: Mapping[Observation, Statistic] | None = None,
) -> Ranges:
    """What was found, by use; in the order in which a scope lists what it watches."""
    ranges: Ranges = {}
    wanted = _wanted(graph, plan)
    statistics = _statistics(graph, wanted, found, known or {})
    for observation, readers in wanted.items():
        statistic = statistics[observation]
        for use in readers:
            entry, reason = plan.entries[use], _unfit(statistic)
            if (
                reason == _ZERO
                and isinstance(entry, Quantize)
                and entry.given
                and entry.given.min_range
            ):
                reason = ""
            if reason and isinstance(entry, Quantize) and entry.bounds is None:
                plan.keep(use.tensor, reason)
            elif not reason:
                ranges[use] = statistic
    for inside in insides:
        if inside.played:
            inside.ranges = _ranges(inside.graph, inside.plan, inside.insides, found)
    return ranges


def _measured(graph: Graph, use: Use, entry: Quantize) -> bool:
    known = entry.given is not None and entry.given.known
    return entry.spec.measured and not known and not graph.is_constant(use.tensor)


def _unfit(statistic: Statistic) -> str:
    if not statistic.lo.size:
        return "it never had a float value during calibration"
    if statistic.nonfinite:
        return "it held NaN or infinite values during calibration"
    if not (statistic.lo.any() or statistic.hi.any()):
        return _ZERO
    return ""


def stretch(length: int | None) -> range:
    """Return the places of the consecutive samples that are held out of so many.

    None where there are too few.

    Args:
        length: number of samples; None if it is not known.
    """
    if length is None:
        return range(_EVERY // 2, _EVERY // 2 + _AT_MOST)
    count = min(_RUN_AT_MOST, length // _RUN_EVERY)
    start = min(_EVERY // 2, length // 2)
    return range(start, start + count) if count > 1 else range(0)


class _Reservoir:
    """A few samples, drawn evenly from a stream of unknown length, within a bound of bytes.

    Algorithm R (Vitter, "Random Sampling with a Reservoir", 1985), always with the same draws.
    """

    def __init__(self, most: int, size: int) -> None:
        self._most, self._size = most, size
        self._draws = random.Random(0)
        self._seen = 0
        self._kept: dict[int, Any] = {}

    @property
    def samples(self) -> list[Any]:
        """The samples in the order of the stream."""
        return [self._kept[index] for index in sorted(self._kept)]

    def add(self, sample: Any) -> None:
        index = self._seen
        self._seen += 1
        if len(self._kept) < self._most:
            self._kept[index] = sample
        else:
            place = self._draws.randrange(self._seen)
            if place < self._most:
                self._kept.pop(sorted(self._kept)[place])
                self._kept[index] = sample
        self._bound()

    def shrink(self, most: int) -> None:
        """Keep at most so many samples from now on."""
        self._most = min(self._most, most)
        self._bound()

    def _bound(self) -> None:
        while len(self._kept) > self._most:
            self._kept.popitem()
        while self._kept and _array_bytes(self._kept.values()) > self._size:
            self._kept.popitem()
            self._most = min(self._most, max(1, len(self._kept)))


def _array_bytes(samples: Iterable[Any]) -> int:
    """Size of the arrays in samples."""
    total = 0
    for sample in samples:
        values = sample.values() if isinstance(sample, Mapping) else ()
        total += sum(getattr(value, "nbytes", 0) for value in values)
    return total


class HoldOut:
    """Diverts a few samples from calibration, for measuring the result.

    Attributes:
        samples: what was held out.
        late: samples held out for the verdict alone: one in ten from the hundredth on.
        first: the first ``remember`` samples that went on to calibration.
        count: how many samples went on to calibration.
    """

    def __init__(
        self,
        samples: Iterable[Any],
        *,
        remember: int = 0,
        run: range = range(0),
        verdict: bool = False,
    ) -> None:
        """Start with nothing held out.

        Args:
            samples: the calibration data.
            remember: how many of the first calibration samples to keep.
            run: places of consecutive samples to hold out, as recurrent models need; else single
                ones are.
            verdict: keep samples for the verdict, too, at most 64 MiB each of held-out and of
                calibration samples.
        """
        self._source = samples
        self._run = run
        self._remember = remember
        self._verdict = verdict and not run
        self._reservoir = _Reservoir(_VERDICT_SAMPLES, _VERDICT_BYTES)
        self.samples: list[Any] = []
        self.late: list[Any] = []
        self.first: list[Any] = []
        self.count = 0

    @property
    def calibrated(self) -> list[Any]:
        """A few calibration samples, drawn evenly from all, for the verdict."""
        return self._reservoir.samples

    def __iter__(self) -> Iterator[Any]:
        for index, sample in enumerate(self._source):
            single = index % _EVERY == _EVERY // 2 and len(self.samples) < _AT_MOST
            if index in self._run if self._run else single:
                self.samples.append(sample)
            elif self._held_late(index, sample):
                self.late.append(sample)
                self._reservoir.shrink(_VERDICT_SAMPLES - len(self.late))
            else:
                if self._verdict:
                    self._reservoir.add(sample)
                if self.count < self._remember:
                    self.first.append(sample)
                self.count += 1
                yield sample

    def _held_late(self, index: int, sample: Any) -> bool:
        due = index >= _MANY and index % _EVERY_LATE == _EVERY_LATE // 2
        if not (self._verdict and due) or len(self.late) >= _VERDICT_SAMPLES:
            return False
        return _array_bytes([*self.late, sample]) <= _VERDICT_BYTES
