"""Calibration in a single streaming pass over the data.

The pass collects a statistic for every tensor whose scale must be measured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from onnx import ModelProto

from calibrators import Extremes, Histogram, Statistic
from calibrators.onnx_runtime.control_flow import Observation, Scope
from calibrators.onnx_runtime.runner import Progress, Receive, collect
from calibrators.shown import short
from quark_onnx.common.errors import ConfigError, DataError, data_errors
from quark_onnx.common.wording import counted
from quark_onnx.graph import Graph
from quark_onnx.measuring.calibration import GraphCalibration
from quark_onnx.plan import Plan, PlanBuilder, Quantize, Use
from quark_onnx.planning import bounded
from quark_onnx.planning.subgraph_plans import SubgraphPlan, controls, shapeless
from quark_onnx.running.run import Sample

#: The measured statistic of every use.
Ranges = dict[Use, Statistic]


class Calibrated(NamedTuple):
    """The result of calibration.

    Attributes:
        plan: the plan, in which tensors that are unfit for a scale are float, with the reason.
        ranges: the statistics of the other measured tensors.
        body_plans: the bodies, with plans and ranges of their own.
    """

    plan: Plan
    ranges: Ranges
    body_plans: list[SubgraphPlan]


#: Statistics whose merge equals the statistic of all values, independent of order.
_EXACT = (Extremes, Histogram)
_ZERO = "it was zero throughout calibration: there is no range to measure"


def calibrate(  # noqa: PLR0913
    graph: Graph,
    plan: Plan,
    samples: Iterable[Sample],
    body_plans: Sequence[SubgraphPlan] = (),
    *,
    keyed: GraphCalibration | None = None,
    others: Sequence[Plan] = (),
    executor: Executor | None = None,
    progress: Progress | None = None,
    receive: Receive | None = None,
    extended: Graph | None = None,
    partial: GraphCalibration | None = None,
) -> Calibrated:
    """Run the float graph over the samples once, and measure ranges.

    Args:
        graph: the float graph.
        plan: the plan of the graph.
        samples: calibration samples, read once.
        body_plans: bodies of the graph's nodes, with ranges of their own.
        keyed: earlier statistics, not measured again; new statistics are added in a form that
            serves every calibrator.
        others: further plans of the graph, measured for ``keyed`` only.
        executor: runs the model; None for the default.
        progress: reports progress.
        receive: as for ``collect``; called only if the graph is run.
        extended: the graph with further outputs, for ``receive``.
        partial: statistics of the first samples. If they hold every wanted tensor, the graph is run
            on the later samples only, and ``receive`` is called for these. Not with ``keyed``.

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
    if partial is not None and not body_plans:
        partial_statistics = partial.known(watched)
        # One missing tensor needs a run over the first samples anyway.
        if len(partial_statistics) == len(watched):
            statistics = _continued(
                extended or graph,
                watched,
                partial_statistics,
                partial.calibration.samples,
                samples,
                executor=executor,
                progress=progress or (lambda done: None),
                receive=receive,
            )
            return _ranges(graph, plan, (), iter(statistics))
    if keyed is not None:
        # Duplicates among the plans are merged by ``richer``.
        for other in others:
            watched += _watched(graph, _wanted(graph, other), known)
        watched = keyed.richer(watched)
        samples = keyed.counted(samples)
    # ``collect`` takes the main graph's model as an argument, so that its scope has an empty model.
    scope = _scope(ModelProto(), watched, body_plans)
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
    return _ranges(graph, plan, body_plans, iter(statistics), known)


def _continued(  # noqa: PLR0913
    graph: Graph,
    watched: Sequence[Observation],
    known: Mapping[Observation, Statistic],
    first: int,
    samples: Iterable[Sample],
    *,
    executor: Executor | None,
    progress: Progress,
    receive: Receive | None,
) -> list[Statistic]:
    """Return the statistics of all samples, where those of the first ones are known.

    Args:
        watched: the tensors to measure.
        known: the statistics over the first samples, of every watched tensor; not changed.
        first: number of leading samples with known statistics.
        samples: all samples, the known ones first; read once.
        executor: runs the model; None for the default.
        progress: called with the number of samples read.
        receive: called with the position among all samples and the outputs of each further
            sample; None to ignore the outputs.

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
    later = iter(samples)
    with data_errors():
        for done in range(1, first + 1):
            # The first samples are read only so that they are counted and held out.
            next(later, None)
            progress(done)
        # Without further samples no session is opened.
        following = next(later, None)
        if following is None:
            return totals
        statistics = collect(
            graph.to_model,
            watched,
            chain([following], later),
            executor=executor,
            # Positions continue after the first samples.
            progress=lambda done: progress(first + done),
            receive=receive
            and (lambda position, outputs: receive(first + position, outputs)),
        )
    for total, statistic in zip(totals, statistics, strict=True):
        total.merge(statistic)
    return totals


def _read_through(samples: Iterable[Sample]) -> list[Statistic]:
    """Read every sample without measuring, so that held-out samples are collected."""
    for _ in samples:
        pass
    return []


def known_ranges(
    graph: Graph,
    plan: Plan,
    body_plans: list[SubgraphPlan],
    keyed: GraphCalibration | None,
) -> Calibrated:
    """Return the ranges that are known without data.

    Args:
        graph: the float graph.
        plan: the plan of the graph.
        body_plans: the plans of bodies.
        keyed: earlier statistics; None if no range has to be measured, as the user gave them.

    Raises:
        ConfigError: the earlier statistics lack some.
        DataError: the ranges that the user gave lack some.
    """
    if keyed is None:
        unknown = list(dict.fromkeys(each.tensor for each in _wanted(graph, plan)))
        if unknown:
            raise DataError(
                f"the given ranges lack tensors ({short(unknown)}), and no calibration data"
                " was given; give data as well",
            )
        return Calibrated(plan, {}, body_plans)
    lacking = missing(graph, plan, keyed)
    # Everything is known: no sample is needed.
    if not lacking and not body_plans:
        return calibrate(graph, plan, (), keyed=keyed)
    calibration = keyed.calibration
    source = f"ranges {calibration.source}".strip()
    if not lacking:
        raise ConfigError(
            f"{source}: the model has bodies (If, Loop or Scan), whose tensors are"
            " measured in each run; give data",
        )
    raise ConfigError(
        f"{source}: {counted(len(lacking), 'tensor lacks', 'tensors lack')} a statistic"
        f" that this configuration needs ({short([each.tensor for each in lacking])});"
        f" there are {', '.join(calibration.kinds) or 'none'} of"
        f" {counted(len(calibration), 'tensor')}; give data, or measure anew",
    )


def missing(graph: Graph, plan: Plan, keyed: GraphCalibration) -> list[Observation]:
    """Return the required observations missing from ``keyed``."""
    wanted = _wanted(graph, plan)
    return _watched(graph, wanted, keyed.known(wanted))


def _scope(
    model: ModelProto,
    watched: Sequence[Observation],
    body_plans: Sequence[SubgraphPlan],
    borrowed: frozenset[str] = frozenset(),
) -> Scope:
    """Return the observations of a graph and of nested bodies.

    Args:
        model: the body as a model; an empty model for the main graph.
        watched: the tensors to measure in the graph itself.
        borrowed: names that a body captures from outer graphs, constants included.
    """
    scopes = list[Scope]()
    for body_plan in body_plans:
        body = body_plan.body
        observed = _watched(body_plan.graph, _wanted(body_plan.graph, body_plan.plan))
        scopes.append(
            _scope(shapeless(body_plan), observed, body_plan.body_plans, body.borrowed)
        )
    # Captured constants are copies in the body, and need no value from outside.
    inputs = frozenset(value.name for value in model.graph.input)
    return Scope(model, tuple(watched), controls(body_plans, scopes), borrowed & inputs)


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
    measured: Iterator[Statistic],
    before: Mapping[Observation, Statistic],
) -> dict[Observation, Statistic]:
    """Return the statistic of every observation, measured now or before.

    Args:
        wanted: the required observations.
        measured: the measured statistics, in the order of ``_watched``; one is consumed for each
            observation that was measured.
        before: statistics known before the run.
    """
    statistics = dict(before)
    for observation in _watched(graph, wanted, before):
        # The same order as in ``_scope``.
        statistics[observation] = next(measured)
    # A Concat may join the results of others: parts are computed before the whole.
    # An explicit stack, because chains of Concat may exceed the recursion limit.
    todo = [observation for observation in wanted if observation not in statistics]
    while todo:
        observation = todo.pop()
        parts = _parts(graph, observation, wanted)
        missing = [part for part in parts if part not in statistics]
        if missing:
            todo += [observation, *missing]
            continue
        statistics[observation] = observation.calibrator.statistic()
        for part in parts:
            statistics[observation].merge(statistics[part])
    return statistics


def _ranges(
    graph: Graph,
    plan: Plan,
    body_plans: Sequence[SubgraphPlan],
    measured: Iterator[Statistic],
    known: Mapping[Observation, Statistic] | None = None,
) -> Calibrated:
    """Return the statistics by use, in the order of the scope's observations.

    Args:
        plan: the plan; not changed.
        measured: the measured statistics, of the graph first and then of the bodies; consumed.
        known: statistics known before the run; None for none.

    Returns:
        The plan, in which tensors that are unfit for a scale are float, the statistics of the
        others by use, and the bodies with their own plans and ranges.
    """
    ranges: Ranges = {}
    # Tensors found unfit become float after all rules have decided.
    changed = PlanBuilder.of(plan)
    wanted = _wanted(graph, plan)
    statistics = _statistics(graph, wanted, measured, known or {})
    for observation, readers in wanted.items():
        statistic = statistics[observation]
        for use in readers:
            entry = plan.entries[use]
            assert isinstance(entry, Quantize)
            reason = _unfit(statistic, entry)
            if reason == _ZERO and plan.asked.all_pairs:
                ranges[use] = _of_steps(entry)
            elif not reason:
                ranges[use] = statistic
            # A tensor with known bounds stays quantized by these.
            elif entry.bounds is None:
                changed.keep(use.tensor, reason)
    bodies = list[SubgraphPlan]()
    for body_plan in body_plans:
        # A body that was not run has no statistics in ``found``.
        if not body_plan.played:
            bodies.append(body_plan)
            continue
        body = _ranges(body_plan.graph, body_plan.plan, body_plan.body_plans, measured)
        bodies.append(
            replace(
                body_plan,
                plan=body.plan,
                ranges=body.ranges,
                body_plans=body.body_plans,
            )
        )
    return Calibrated(changed.build(), ranges, bodies)


def _measured(graph: Graph, use: Use, entry: Quantize) -> bool:
    """Return whether calibration has to measure the range of a use."""
    is_given = entry.given is not None and entry.given.known
    return entry.spec.measured and not is_given and not graph.is_constant(use.tensor)


def _of_steps(entry: Quantize) -> Statistic:
    """Return a statistic whose scale is 1, from 0 upward."""
    grid = entry.spec.grid
    greatest = grid.qmax if entry.spec.symmetric else grid.qmax - grid.qmin
    statistic = entry.spec.calibrator.statistic()
    statistic.observe(np.array([[0, greatest]], np.float32))
    return statistic


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
