"""Calibration in a single streaming pass over the data.

The pass collects a statistic for every tensor whose scale must be measured.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import chain, count
from typing import Any, NamedTuple

from onnx import ModelProto

from calibrators import Extremes, Histogram, Statistic
from calibrators.onnx_runtime.control_flow import Observation, Scope
from calibrators.onnx_runtime.runner import Progress, Receive, collect
from calibrators.readers.spool import Spool
from quark_onnx.common.errors import data_errors
from quark_onnx.graph import Graph
from quark_onnx.measuring.calibration import Keyed
from quark_onnx.plan import Plan, PlanBuilder, Quantize, Use
from quark_onnx.planning import bounded
from quark_onnx.planning.subgraph_plans import SubgraphPlan, controls, shapeless
from quark_onnx.running.run import Sample

#: The measured statistic of every use.
Ranges = dict[Use, Statistic]


class Calibrated(NamedTuple):
    """What calibration found.

    Attributes:
        plan: the plan; tensors that turned out to be unfit are float, with the reason.
        ranges: the statistics of the other measured tensors.
        insides: the bodies, with plans and ranges of their own.
    """

    plan: Plan
    ranges: Ranges
    insides: list[SubgraphPlan]


#: Statistics whose merge equals the statistic of all values, independent of order.
_EXACT = (Extremes, Histogram)
_ZERO = "it was zero throughout calibration: there is no range to measure"
#: The first samples all calibrate: ten are too few to hold any out.
_CALIBRATING = 10
#: Positions of the held-out samples among the first 64, and the stride of those after them: 16 of
#: 64, and a tenth of the rest. A small calibration set keeps most of its samples.
_EARLY = (_CALIBRATING, 20, 30, *range(38, 64, 2))
_EARLY_END, _EVERY_LATER = 64, 10
#: Held-out samples of a large model or of large samples; decisions are made on so many as well.
_FEW = 4
#: Limit of the arrays of held-out samples in bytes: 16 images of 3 x 800 x 800 pixels.
_HELD_OUT_BYTES = 1 << 27
#: Calibration samples of the verdict, and the limit of their arrays in bytes.
_VERDICT_SAMPLES, _VERDICT_BYTES = 28, 1 << 26
#: Stride and maximum number for a recurrent model, whose held-out samples are consecutive.
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
    receive: Receive | None = None,
    extended: Graph | None = None,
    begun: Keyed | None = None,
) -> Calibrated:
    """Run the float graph over the samples once, and measure ranges.

    Args:
        graph: the float graph.
        plan: the plan of the graph.
        samples: calibration samples, read once.
        insides: bodies of the graph's nodes, with ranges of their own.
        keyed: earlier statistics, not measured again; new statistics are added in a form that
            serves every calibrator.
        others: further plans of the graph, measured for ``keyed`` only.
        executor: runs the model; None for the default.
        progress: reports progress.
        receive: as for ``collect``; called only if the graph is run.
        extended: the graph with further outputs, for ``receive``.
        begun: statistics of the first samples, which are not run again where all are known;
            ``receive`` is not called for them. Not with ``keyed``.

    Returns:
        The plan, in which tensors that are unfit for a scale are float, the statistics by use, and
        the bodies with their own plans and ranges.

    Raises:
        DataError: a sample does not fit the inputs or cannot be run.
    """
    wanted = _wanted(graph, plan)
    known = {} if keyed is None else keyed.known(wanted)
    watched = _watched(graph, wanted, known)
    # Bodies have no keys: their tensors are measured in each run.
    if begun is not None and not insides:
        begun_statistics = begun.known(watched)
        # All or nothing: one missing tensor needs a run over the first samples anyway.
        if len(begun_statistics) == len(watched):
            later = _Rest(begun.calibration.samples, samples, progress, receive)
            statistics = later.collect(
                extended or graph, watched, begun_statistics, executor
            )
            return _ranges(graph, plan, (), iter(statistics))
    if keyed is not None:
        # Duplicates among the plans are merged by ``richer``.
        for other in others:
            watched += _watched(graph, _wanted(graph, other), known)
        watched = keyed.richer(watched)
        samples = keyed.counted(samples)
    # ``collect`` takes the main graph's model as an argument, so that its scope has an empty model.
    scope = _scope(ModelProto(), watched, insides)
    with data_errors():
        # Nothing is left to measure, and the float model need not run.
        if known and next(scope.flat(), None) is None:
            statistics = _read_through(samples)
        else:
            statistics = collect(
                (extended or graph).to_model,
                scope.observations,
                samples if keyed is None else keyed.measured(samples),
                controls=scope.controls,
                executor=executor,
                progress=progress,
                receive=receive,
            )
    if keyed is not None:
        # Statistics of the main graph come first, those of bodies follow in the order of
        # ``scope.flat``.
        keyed.keep(watched, statistics[: len(watched)])
        statistics = statistics[len(watched) :]
        known = keyed.known(wanted)
    return _ranges(graph, plan, insides, iter(statistics), known)


class _Rest:
    """The samples that follow the first ones, whose statistics are known."""

    def __init__(
        self,
        first: int,
        samples: Iterable[Sample],
        progress: Progress | None,
        receive: Receive | None,
    ) -> None:
        """Remember the samples; none is read yet.

        Args:
            first: number of leading samples with known statistics.
            samples: all samples, the known ones first; read once.
            progress: called with the number of samples read; None for none.
            receive: called with the position among all samples and the outputs of each further
                sample; None for none.
        """
        self._first = first
        self._samples = iter(samples)
        self._progress = progress
        self._receive = receive

    def collect(
        self,
        graph: Graph,
        watched: Sequence[Observation],
        known: Mapping[Observation, Statistic],
        executor: Executor | None,
    ) -> list[Statistic]:
        """Return the statistics of all samples.

        Args:
            watched: the tensors to measure.
            known: the statistics over the first samples, of every watched tensor; not changed.
            executor: runs the model; None for the default.

        Returns:
            The statistics, in the order of ``watched``.

        Raises:
            DataError: a sample does not fit the inputs or cannot be run.
        """
        totals = list[Statistic]()
        for observation in watched:  # tensors of equal values share a known statistic
            total = observation.calibrator.statistic()
            # Merged into an empty statistic: the known one belongs to the calibration, and must not
            # change.
            total.merge(known[observation])
            totals.append(total)
        with data_errors():
            for done in range(1, self._first + 1):
                # The first samples are read only so that they are counted and held out.
                next(self._samples, None)
                self._update(done)
            # Without further samples no session is opened.
            following = next(self._samples, None)
            if following is None:
                return totals
            statistics = collect(
                graph.to_model,
                watched,
                chain([following], self._samples),
                executor=executor,
                # Positions continue after the first samples.
                progress=lambda done: self._update(self._first + done),
                receive=self._received if self._receive is not None else None,
            )
        for total, statistic in zip(totals, statistics, strict=True):
            total.merge(statistic)
        return totals

    def _update(self, done: int) -> None:
        if self._progress is not None:
            self._progress(done)

    def _received(self, position: int, outputs: Mapping[str, Any]) -> None:
        if self._receive is not None:
            self._receive(self._first + position, outputs)


def _read_through(samples: Iterable[Sample]) -> list[Statistic]:
    """Read every sample without measuring, so that held-out samples are collected."""
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
) -> list[Calibrated]:
    """Return the ranges of several plans of one graph, from one pass over the samples.

    Bodies are skipped.

    Args:
        graph: the float graph.
        plans: plans of the graph.
        samples: calibration samples, read once.
        progress: reports progress.
        keyed: as for ``calibrate``.

    Returns:
        Plan and ranges of every plan, in the order of ``plans``.

    Raises:
        DataError: a sample that does not fit or cannot be run.
    """
    wanted = [_wanted(graph, plan) for plan in plans]
    # Plans of one graph mostly want the same observations, each of which is measured once.
    observations = list(dict.fromkeys(chain.from_iterable(wanted)))
    known = {} if keyed is None else keyed.known(observations)
    watched = list(
        dict.fromkeys(
            observation
            for group in wanted
            for observation in _watched(graph, group, known)
        ),
    )
    if keyed is not None:
        watched = keyed.richer(watched)
    statistics = list[Statistic]()
    if watched:
        if keyed is not None:
            samples = keyed.measured(samples)
        with data_errors():
            statistics = collect(graph.to_model, watched, samples, progress=progress)
    if keyed is not None:
        keyed.keep(watched, statistics)
        known = keyed.known(observations)
    else:
        known = dict(zip(watched, statistics, strict=True))
    return [_ranges(graph, plan, (), iter(()), known) for plan in plans]


def missing(graph: Graph, plan: Plan, keyed: Keyed) -> list[Observation]:
    """Return the required observations missing from ``keyed``."""
    wanted = _wanted(graph, plan)
    return _watched(graph, wanted, keyed.known(wanted))


def _scope(
    model: ModelProto,
    watched: Sequence[Observation],
    insides: Sequence[SubgraphPlan],
    borrowed: frozenset[str] = frozenset(),
) -> Scope:
    """Return the observations of a graph and of nested bodies.

    Args:
        model: the body as a model; an empty model for the main graph.
        watched: the tensors to measure in the graph itself.
        borrowed: names that a body captures from outer graphs, constants included.
    """
    scopes = list[Scope]()
    for inside in insides:
        body = inside.body
        observed = _watched(inside.graph, _wanted(inside.graph, inside.plan))
        scopes.append(
            _scope(shapeless(inside), observed, inside.insides, body.borrowed)
        )
    # Captured constants are copies in the body, and need no value from outside.
    inputs = frozenset(value.name for value in model.graph.input)
    return Scope(model, tuple(watched), controls(insides, scopes), borrowed & inputs)


def _wanted(graph: Graph, plan: Plan) -> dict[Observation, list[Use]]:
    """Return the required observations by use.

    Returns:
        For every observation, the uses that share it; both in the order of the plan. Constants,
        dynamic scales and given ranges need no observation.
    """
    wanted: dict[Observation, list[Use]] = {}
    for use, entry in plan.entries.items():
        if isinstance(entry, Quantize) and _measured(graph, use, entry):
            if entry.bounds is None:
                calibrator = entry.spec.calibrator
            else:
                # A known range is only reduced by the data, whatever the configured calibrator.
                calibrator = bounded.calibrator_for(entry.spec)
            # Uses with one calibrator and axis share an observation.
            wanted.setdefault(
                Observation(use.tensor, calibrator, entry.axis), []
            ).append(use)
    return wanted


def _watched(
    graph: Graph, wanted: Collection[Observation], known: Collection[Observation] = ()
) -> list[Observation]:
    """Return the required observations without known statistics.

    A Concat of watched tensors is not watched: its values are the values of its inputs.

    Returns:
        The observations to measure, in the order of ``wanted``.
    """
    return [
        observation
        for observation in wanted
        if observation not in known and not _parts(graph, observation, wanted)
    ]


def _parts(
    graph: Graph, observation: Observation, wanted: Collection[Observation]
) -> list[Observation]:
    """Return observations whose statistics merge exactly to the given observation.

    Args:
        wanted: the required observations, among which the parts have to be.

    Returns:
        An observation for every input of a Concat; empty if the observation must be measured
        directly.
    """
    node = graph.producer(observation.tensor)
    # The exact type: subclasses of Extremes average over batches, or sample vectors of channels.
    exact = type(observation.calibrator.statistic()) in _EXACT
    if (
        node is None
        or node.kind != "Concat"
        # Channels of the parts are other channels of the whole.
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
    """Return the statistic of every observation, measured now or before.

    Args:
        wanted: the required observations.
        found: the measured statistics, in the order of ``_watched``; one is consumed for each
            observation that was measured.
        before: statistics known before the run.
    """
    known = dict(before)
    for observation in _watched(graph, wanted, before):
        # The same order as in ``_scope``.
        known[observation] = next(found)
    # A Concat may join the results of others: parts are computed before the whole.
    # An explicit stack, because chains of Concat may exceed the recursion limit.
    todo = [observation for observation in wanted if observation not in known]
    while todo:
        observation = todo.pop()
        parts = _parts(graph, observation, wanted)
        missing = [part for part in parts if part not in known]
        if missing:
            todo += [observation, *missing]
            continue
        known[observation] = observation.calibrator.statistic()
        for part in parts:
            known[observation].merge(known[part])
    return known


def unmeasured(graph: Graph, plan: Plan) -> list[str]:
    """Return the tensors whose ranges depend on calibration data."""
    wanted = _wanted(graph, plan)
    return list(dict.fromkeys(observation.tensor for observation in wanted))


def _ranges(
    graph: Graph,
    plan: Plan,
    insides: Sequence[SubgraphPlan],
    found: Iterator[Statistic],
    known: Mapping[Observation, Statistic] | None = None,
) -> Calibrated:
    """Return the statistics by use, in the order of the scope's observations.

    Args:
        plan: the plan; not changed.
        found: the measured statistics, of the graph first and then of the bodies; consumed.
        known: statistics known before the run; None for none.

    Returns:
        The plan, in which tensors that are unfit for a scale are float, the statistics of the
        others by use, and the bodies with their own plans and ranges.
    """
    ranges: Ranges = {}
    # Tensors found unfit become float after all rules have decided.
    changed = PlanBuilder.of(plan)
    wanted = _wanted(graph, plan)
    statistics = _statistics(graph, wanted, found, known or {})
    for observation, readers in wanted.items():
        statistic = statistics[observation]
        for use in readers:
            entry = plan.entries[use]
            assert isinstance(entry, Quantize)
            reason = _unfit(statistic, entry)
            if not reason:
                ranges[use] = statistic
            # A tensor with known bounds stays quantized by these.
            elif entry.bounds is None:
                changed.keep(use.tensor, reason)
    bodies = list[SubgraphPlan]()
    for inside in insides:
        # A body that was not run has no statistics in ``found``.
        if not inside.played:
            bodies.append(inside)
            continue
        body = _ranges(inside.graph, inside.plan, inside.insides, found)
        bodies.append(
            replace(inside, plan=body.plan, ranges=body.ranges, insides=body.insides)
        )
    return Calibrated(changed.build(), ranges, bodies)


def _measured(graph: Graph, use: Use, entry: Quantize) -> bool:
    """Return whether calibration has to measure the range of a use."""
    is_given = entry.given is not None and entry.given.known
    return entry.spec.measured and not is_given and not graph.is_constant(use.tensor)


def _unfit(statistic: Statistic, entry: Quantize) -> str:
    """Return why a statistic gives no scale; empty if it does.

    Args:
        entry: the decision for the tensor, possibly with a minimum range of the user.
    """
    if not statistic.lo.size:
        return "it never had a float value during calibration"
    if statistic.nonfinite:
        return "it held NaN or infinite values during calibration"
    # A user's least range gives a scale to a tensor of zeros.
    is_widened = entry.given is not None and entry.given.min_range
    if not (statistic.lo.any() or statistic.hi.any() or is_widened):
        return _ZERO
    return ""


def stretch(length: int | None) -> range:
    """Return the positions of the consecutive held-out samples.

    The range is empty for too few samples.

    Args:
        length: number of samples; None if unknown.
    """
    if length is None:
        # Of a stream of unknown length, as many samples after the start as of 64.
        return range(_CALIBRATING, _CALIBRATING + len(_EARLY))
    count = max(min(_RUN_AT_MOST, length // _RUN_EVERY), held_out_of(length))
    start = min(_CALIBRATING, length // 2)
    if count > 1:
        return range(start, start + count)
    return range(0)


def is_held_out(position: int) -> bool:
    """Return whether a sample is held out from calibration.

    The position decides alone: a stream of unknown length is split like a list.

    >>> [position for position in range(44) if is_held_out(position)]
    [10, 20, 30, 38, 40, 42]
    """
    if position < _EARLY_END:
        return position in _EARLY
    return position % _EVERY_LATER == _EVERY_LATER // 2


def held_out_of(length: int) -> int:
    """Return how many of some samples are held out: 16 of 64, at least a tenth of more.

    >>> [held_out_of(length) for length in (10, 11, 32, 64, 100, 256, 1000)]
    [0, 1, 3, 16, 20, 36, 110]
    """
    return sum(map(is_held_out, range(length)))


def samples_for(held_out: int) -> int:
    """Return the number of samples of which a number is held out.

    >>> samples_for(1), samples_for(16)
    (11, 63)
    """
    return next(length for length in count(1) if held_out_of(length) >= held_out)


class _Reservoir:
    """A uniform random subset of a stream of unknown length, limited in bytes.

    Algorithm R (Vitter, "Random Sampling with a Reservoir", 1985), with a fixed seed.
    """

    def __init__(self, most: int, size: int) -> None:
        """Start without samples.

        Args:
            most: maximum number of samples.
            size: maximum total size of their arrays, in bytes.
        """
        self._most, self._size = most, size
        self._draws = random.Random(0)
        self._seen = 0
        self._kept: dict[int, Any] = {}

    @property
    def positions(self) -> list[int]:
        """The positions of the samples in the stream."""
        return sorted(self._kept)

    @property
    def samples(self) -> list[Any]:
        """The samples in the order of the stream."""
        return [self._kept[position] for position in self.positions]

    def add(self, sample: Any) -> None:
        """Keep the next sample of the stream, in place of another one if full, or drop it."""
        index = self._seen
        self._seen += 1
        if len(self._kept) < self._most:
            self._kept[index] = sample
        else:
            # Sample number n replaces a kept one with probability most / n.
            drawn = self._draws.randrange(self._seen)
            if drawn < self._most:
                self._kept.pop(sorted(self._kept)[drawn])
                self._kept[index] = sample
        self._bound()

    def shrink(self, most: int) -> None:
        """Keep at most ``most`` samples from now on."""
        self._most = min(self._most, most)
        self._bound()

    def _bound(self) -> None:
        """Drop the latest samples until number and bytes are within the limits."""
        while len(self._kept) > self._most:
            # popitem removes the sample that was added last.
            self._kept.popitem()
        while self._kept and _array_bytes(self._kept.values()) > self._size:
            self._kept.popitem()
            # As many samples of this size fit; one more would exceed the limit again.
            self._most = min(self._most, max(1, len(self._kept)))


def _array_bytes(samples: Iterable[Any]) -> int:
    """Return the total size of the arrays in samples, in bytes.

    Args:
        samples: mappings from names to values; values other than arrays count as 0.
    """
    total = 0
    for sample in samples:
        values = sample.values() if isinstance(sample, Mapping) else ()
        total += sum(getattr(value, "nbytes", 0) for value in values)
    return total


class HoldOut:
    """A filter that holds out calibration samples for measuring the result.

    Ranges are measured without them: on samples whose values are within the ranges, a result has
    no clipping, and looks better than on new data.

    Attributes:
        samples: the held-out samples.
        first: the first ``remember`` calibration samples.
        count: number of samples passed on to calibration.
    """

    def __init__(
        self,
        samples: Iterable[Any],
        *,
        remember: int = 0,
        run: range = range(0),
        verdict: bool = False,
        most: int | None = None,
    ) -> None:
        """Start without held-out samples.

        Args:
            samples: the calibration data.
            remember: number of first calibration samples to keep.
            run: positions of consecutive samples to hold out, required by recurrent models; if
                empty, single samples are held out.
            verdict: keep some calibration samples for the verdict, too, at most 64 MiB.
            most: maximum number of held-out samples, for a model that takes long to run; None for
                no limit but 128 MiB. Four are held out in any case.
        """
        self._source = samples
        self._run = run
        self._remember = remember
        self._verdict = verdict and not run
        self._most = most
        self._bytes = 0
        self._reservoir = _Reservoir(_VERDICT_SAMPLES + _FEW, _VERDICT_BYTES)
        self._outputs: dict[int, Mapping[str, Any]] = {}
        self.samples: list[Any] = []
        self.first: list[Any] = []
        self.count = 0

    @property
    def deciding(self) -> list[Any]:
        """Return the held-out samples that decisions between settings are made on.

        They are few, because each decision runs models on them: four from all of the data, or the
        consecutive ones of a recurrent model.
        """
        if self._run:
            return self.samples[:_RUN_AT_MOST]
        stride = max(1, len(self.samples) // _FEW)
        return self.samples[::stride][:_FEW]

    @property
    def calibrated(self) -> list[Any]:
        """Return a few calibration samples for the verdict, drawn evenly."""
        return self._reservoir.samples

    def receive(self, position: int, outputs: Mapping[str, Any]) -> None:
        """Keep the float outputs on a calibration sample that the verdict needs.

        Args:
            position: position among the calibration samples.
            outputs: outputs of the calibrated graph.
        """
        positions = set(self._reservoir.positions)
        for dropped in self._outputs.keys() - positions:
            del self._outputs[dropped]
        kept = [*self._outputs.values(), outputs]
        if position in positions and _array_bytes(kept) <= _VERDICT_BYTES:
            self._outputs[position] = outputs

    def computed(self) -> Iterator[tuple[Any, Mapping[str, Any]]]:
        """Yield the calibration samples of the verdict that have known outputs."""
        reservoir = self._reservoir
        for position, sample in zip(
            reservoir.positions, reservoir.samples, strict=True
        ):
            if position in self._outputs:
                yield sample, self._outputs[position]

    def __iter__(self) -> Iterator[Any]:
        for index, sample in enumerate(self._source):
            chosen = index in self._run if self._run else is_held_out(index)
            if chosen and self._has_room(sample):
                self.samples.append(sample)
                self._bytes += _array_bytes([sample])
                # Held-out samples are better evidence, and come first.
                self._reservoir.shrink(
                    max(0, _VERDICT_SAMPLES + _FEW - len(self.samples))
                )
            else:
                if self._verdict:
                    self._reservoir.add(sample)
                if self.count < self._remember:
                    self.first.append(sample)
                self.count += 1
                yield sample

    def _has_room(self, sample: Any) -> bool:
        """Return whether another sample can be held out, within the limits."""
        if len(self.samples) < _FEW:
            return True
        if self._most is not None and len(self.samples) >= self._most:
            return False
        return self._bytes + _array_bytes([sample]) <= _HELD_OUT_BYTES


def held_out_samples(
    samples: Spool, *, consecutive: bool = False, most: int | None = None
) -> list[Any]:
    """Return the samples that a run on these samples holds out, in their order.

    Args:
        samples: the samples of the run.
        consecutive: whether the run holds out consecutive samples, as for recurrent models.
        most: as for ``HoldOut``.
    """
    run = stretch(len(samples)) if consecutive else range(0)
    held = HoldOut(samples, run=run, most=most)
    for _ in held:  # the others, for calibration
        pass
    return held.samples
