"""Raise or lower the bits of nodes, ranked by the output error that each node causes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from onnx import ModelProto

from calibrators import Statistic
from calibrators.onnx_runtime.session import open_session
from quark_onnx.config import Override, QConfig
from quark_onnx.errors import ConfigError, nearest
from quark_onnx.graph import Graph, Node
from quark_onnx.optimizers import AutoMixedPrecision, Samples
from quark_onnx.patterns.runtime import raised_runtime
from quark_onnx.plan import Keep, Plan, Quantize, Use, matching
from quark_onnx.progress import Progress
from quark_onnx.report.measure import least_sqnr, measure
from quark_onnx.steps.calibrate import Ranges, calibrate_each
from quark_onnx.steps.calibration import Keyed
from quark_onnx.steps.compute_qparams import (
    Params,
    compute_bias_qparams,
    compute_qparams,
)
from quark_onnx.steps.function_bodies import define_functions
from quark_onnx.steps.insert import insert
from quark_onnx.steps.keep_sensitive_float import keep_sensitive_ops_float
from quark_onnx.steps.make_plan import make_plan
from quark_onnx.steps.run import Sample

#: At most so many changed nodes are tried to be changed back; so many others, to be lowered as
#: well.
_TRIES = 24
#: So many samples besides those that rank nodes decide or check, at most.
_OTHERS = 48
#: Runs of which a runtime is the median, the least runtime in seconds that tells anything, and how
#: much longer than the float model a result may take before the report says so.
_RUNS, _LEAST_RUNTIME, _SLOWER = 5, 1e-3, 1.05


@dataclass
class Sensitivity:
    """What was found.

    Attributes:
        noise: the error at the outputs that each node causes when it alone is quantized, or
            lowered; in dB of SQNR, by the user's metric, or as a negative distance.
        changed: the nodes that get more bits, the worst first; or fewer, the least harmful first.
        before, after: the goal without changed nodes, and with them, on the samples that decided.
        reached: whether that meets the target.
        into: what becomes of a changed node.
        decided: number of samples that decided which nodes are changed; those by which nodes were
            ranked are others where there are enough.
        held_out: the goal with the changed nodes on samples that nothing was decided by; None where
            there are none.
        checked: the number of these.
        slowdown: runtime of the result relative to that of the float model, measured here; 0 where
            it was not measured.
    """

    noise: dict[str, float] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    before: float = np.inf
    after: float = np.inf
    reached: bool = True
    into: str = "float"
    decided: int = 0
    held_out: float | None = None
    checked: int = 0
    slowdown: float = 0.0


def mix(  # noqa: PLR0913
    graph: Graph,
    config: QConfig,
    samples: Samples,
    *,
    held_out: Sequence[Sample] = (),
    keyed: Keyed | None = None,
    show: bool | None = False,
) -> tuple[QConfig, Sensitivity | None]:
    """Return the configuration with an override for the nodes that need other bits, and what was
    found.

    Without the optimizer in the configuration, that is returned as it is.

    Args:
        samples: calibration data. Nodes are ranked by the first few; others decide.
        held_out: samples that nothing is decided by.
        keyed: what was measured before; what is measured now is added.
    """
    found = [
        optimizer
        for optimizer in config.optimizers
        if isinstance(optimizer, AutoMixedPrecision)
    ]
    if not found:
        return config, None
    if len(found) > 1:
        raise ConfigError(
            "auto_mixed_precision is given twice; one target is all that can be met",
        )
    if not len(samples):
        raise ConfigError(
            "auto_mixed_precision needs calibration data, to measure what each node"
            " does to the outputs",
        )
    found[0].check(config)
    search = _Search(graph, config, found[0], samples, held_out, keyed, show)
    return search.run()


class _Search:
    def __init__(  # noqa: PLR0913
        self,
        graph: Graph,
        config: QConfig,
        settings: AutoMixedPrecision,
        samples: Samples,
        held_out: Sequence[Sample],
        keyed: Keyed | None,
        show: bool | None,
    ) -> None:
        self._graph, self._config, self._settings, self._show = (
            graph,
            config,
            settings,
            show,
        )
        self._few, self._deciding, self._checking = _split(
            samples,
            settings.samples,
            held_out,
        )
        self._float = open_session(graph.to_model())
        self._expected: dict[int, list[list[Any]]] = {}
        self._candidates = _candidates(graph, settings)
        every = tuple(node.name for node in graph.nodes)
        either = (config,) if settings.of_weights else (config, self._with(every))
        plans = [make_plan(graph, each, strict=False) for each in either]
        with Progress(show, len(samples), "measuring ranges", "sample") as bar:
            measured = calibrate_each(graph, plans, samples, bar.update, keyed=keyed)
        self._ranges: list[Ranges] = measured
        self._plans = plans
        self._solved: dict[tuple[Use, Quantize], Params] = {}
        self._goals: dict[tuple[str, ...], float] = {}

    def run(self) -> tuple[QConfig, Sensitivity]:
        settings, result = self._settings, Sensitivity()
        result.into = settings.word(self._config)
        names = [node.name for node in self._graph.nodes if self._changeable(node)]
        result.before = result.after = self._goal(())
        bound = settings.target
        if settings.metric is not None:
            bound = self._metric(self._graph.to_model()) - settings.target
        elif settings.distance is not None:
            bound = -settings.target
        result.reached = result.before >= bound
        # raising is for a target that is missed, and lowering for one that is met
        if result.reached != settings.lowers or not names:
            return self._config, result
        with Progress(self._show, len(names), "measuring nodes", "node") as bar:
            for done, name in enumerate(names, 1):
                result.noise[name] = self._alone(name)
                bar.update(done)
        # those alike in the order of the graph
        order = sorted(names, key=result.noise.__getitem__, reverse=settings.lowers)
        whole = len(names) if settings.of_weights else len(self._graph.nodes)
        most = max(1, int(settings.share * whole))
        if settings.lowers:
            chosen = self._most(order, bound, most)
        else:
            chosen = self._raised(order, result.noise, bound, most)
        result.changed, result.after = chosen, self._goal(tuple(chosen))
        result.reached = result.after >= bound
        self._check(result)
        return self._with(tuple(chosen)), result

    def _raised(
        self,
        order: list[str],
        noise: dict[str, float],
        bound: float,
        most: int,
    ) -> list[str]:
        """Return the nodes to raise, of two choices the one with the shorter estimated runtime.

        One takes the noisiest nodes, the other those with the most noise for their runtime.

        Args:
            order: nodes, the noisiest first.
            noise: the goal where each node alone is quantized.
            bound: the least goal.
            most: no more nodes than this.
        """
        plain = self._needed(self._fewest(order[:most], bound), bound)
        settings = self._settings
        if settings.metric or settings.distance or settings.of_weights:
            return plain  # noise is no energy there, or runtime does not change
        nodes = {node.name: node for node in self._graph.nodes}
        costs = {name: raised_runtime(self._graph, nodes[name]) for name in order}

        def worth(name: str) -> float:
            return float(10 ** (-noise[name] / 10) / max(costs[name], 1.0))

        by_worth = sorted(order, key=worth, reverse=True)[:most]
        other = self._needed(self._fewest(by_worth, bound), bound)
        if self._goal(tuple(other)) < bound:
            return plain
        if self._goal(tuple(plain)) < bound:
            return other
        shorter = sum(map(costs.__getitem__, other)) < sum(
            map(costs.__getitem__, plain),
        )
        return other if shorter else plain

    def _check(self, result: Sensitivity) -> None:
        """Measure the chosen model on samples that nothing was decided by, and its runtime."""
        result.decided = len(self._deciding)
        settings = self._settings
        model = self._built(self._plan_of(self._with(tuple(result.changed))))
        if self._checking and settings.metric is None:
            result.held_out = self._compared(model, self._checking)
            result.checked = len(self._checking)
        if result.changed and not settings.lowers and not settings.of_weights:
            result.slowdown = _slowdown(
                self._float,
                open_session(model),
                self._deciding[0],
            )

    def _most(self, order: list[str], bound: float, most: int) -> list[str]:
        """The longest beginning of a list with which the bound is met, by bisection.

        And some nodes behind it.

        Args:
            order: nodes, the least harmful first.
            bound: the least goal.
            most: no more nodes than this.
        """
        low, high = 0, min(len(order), most) + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._goal(tuple(order[:middle])) >= bound:
                low = middle
            else:
                high = middle
        chosen = order[:low]
        for name in order[low + 1 : low + 1 + _TRIES]:
            if len(chosen) < most and self._goal((*chosen, name)) >= bound:
                chosen.append(name)
        return chosen

    def _fewest(self, order: list[str], bound: float) -> list[str]:
        """The shortest beginning of a list that meets the bound, by bisection.

        All of it if none does.
        """
        low, high = 0, len(order)
        while high - low > 1:
            middle = (low + high) // 2
            if self._goal(tuple(order[:middle])) >= bound:
                high = middle
            else:
                low = middle
        return order[:high]

    def _needed(self, chosen: list[str], bound: float) -> list[str]:
        """The nodes that the bound is missed without, the least noisy tried first."""
        if self._goal(tuple(chosen)) < bound:
            return chosen
        for name in list(reversed(chosen))[1 : 1 + _TRIES]:
            rest = tuple(other for other in chosen if other != name)
            if self._goal(rest) >= bound:
                chosen = list(rest)
        return chosen

    def _with(self, names: tuple[str, ...]) -> QConfig:
        config = self._config
        if not names:
            return config
        return config.with_(
            overrides=(*config.overrides, self._settings.override(names, config)),
        )

    def _alone(self, name: str) -> float:
        """Return the goal where one node alone is quantized, or lowered, on the first samples.

        Of weights, where its weight alone is.
        """
        if self._settings.lowers:
            return self._measured(self._plan_of(self._with((name,))), self._few)
        config = self._config.with_(nodes=(name,))
        config = config.with_(activation=None) if self._settings.of_weights else config
        return self._measured(self._plan_of(config), self._few)

    def _changeable(self, node: Node) -> bool:
        """Whether a node has something to be changed."""
        if node not in self._candidates:
            return False
        plan = self._plans[0]
        if not self._settings.of_weights:
            return plan.touches(node)
        entries = [
            plan.entry(plan.use(name, node))
            for name in node.inputs
            if self._graph.is_constant(name)
        ]
        return any(
            isinstance(entry, Quantize) and self._settings.narrow(entry.spec)
            for entry in entries
        )

    def _goal(self, names: tuple[str, ...]) -> float:
        """The goal where these nodes are changed."""
        if names not in self._goals:
            plan = self._plan_of(self._with(names))
            self._goals[names] = self._measured(plan, self._deciding)
        return self._goals[names]

    def _plan_of(self, config: QConfig) -> Plan:
        return make_plan(
            self._graph,
            config,
            strict=False,
            shapes=self._plans[0].shapes,
        )

    def _measured(self, plan: Plan, samples: Sequence[Sample]) -> float:
        model = self._built(plan)
        if self._settings.metric is not None:
            return self._metric(model)
        return self._compared(model, samples)

    def _compared(self, model: ModelProto, samples: Sequence[Sample]) -> float:
        """Return the goal of a model by its outputs on some samples."""
        session = open_session(model)
        if self._settings.distance is not None:
            key = id(samples)  # of a list that lives as long as this
            if key not in self._expected:
                self._expected[key] = _outputs(self._float, samples)
            found = self._settings.distance(
                self._expected[key],
                _outputs(session, samples),
            )
            return -_number(found, "distance")
        return least_sqnr(measure(self._float, session, samples), np.inf)

    def _metric(self, model: ModelProto) -> float:
        assert self._settings.metric is not None
        return _number(self._settings.metric(model), "metric")

    def _built(self, plan: Plan) -> ModelProto:
        ranges: Ranges = {}
        for use, entry in list(plan.entries.items()):
            if not isinstance(entry, Quantize) or self._graph.is_constant(use.tensor):
                continue
            known = self._measured_as(use, entry)
            if known is not None:
                plan.entries[use], ranges[use] = known
            elif entry.spec.measured:
                plan.entries[use] = Keep("its range was not measured")
        if self._config.safe:
            keep_sensitive_ops_float(self._graph, plan, ranges)
        params = self._solve(plan, ranges)
        compute_bias_qparams(self._graph, plan, params)
        result = insert(self._graph, plan, params)
        define_functions(result)
        return result.to_model()

    def _measured_as(
        self,
        use: Use,
        entry: Quantize,
    ) -> tuple[Quantize, Statistic] | None:
        """The same decision with its range, or one that differs in its bounds alone, from either of
        the two plans.
        """
        for plan, ranges in zip(self._plans, self._ranges, strict=True):
            for other in dict.fromkeys(
                (use, Use(use.tensor), *(u for u in ranges if u.tensor == use.tensor)),
            ):
                planned = plan.entries.get(other) if other in ranges else None
                if isinstance(planned, Quantize) and planned.spec == entry.spec:
                    return planned, ranges[other]
        return None

    def _solve(self, plan: Plan, ranges: Ranges) -> Params:
        """Scales, each found once for the same decision about the same tensor."""
        params = Params()
        for use, entry in list(plan.entries.items()):
            if not isinstance(entry, Quantize) or not entry.spec.measured:
                continue
            key = (Use(use.tensor), entry)
            if key not in self._solved:
                single = Plan(self._graph, plan.specs, shapes=plan.shapes)
                single.entries[use] = entry
                self._solved[key] = compute_qparams(
                    self._graph,
                    single,
                    {use: ranges[use]} if use in ranges else {},
                )
                self._solved[key].table = {
                    Use(use.tensor): each for each in self._solved[key].table.values()
                }
            if Use(use.tensor) in self._solved[key].table:
                params.table[use] = self._solved[key].table[Use(use.tensor)]
            else:
                plan.entries[use] = Keep("its scale cannot be stored")
        return params


def _split(
    samples: Samples,
    few: int,
    held_out: Sequence[Sample],
) -> tuple[list[Sample], list[Sample], list[Sample]]:
    """Return the samples that rank nodes, those that decide, and those that nothing is decided by.

    The first ones rank. Of the others two of three decide; if there are too few of them, the first
    ones decide as well.
    """
    every = iter(samples)
    ranking = list(islice(every, few))
    others = list(islice(every, _OTHERS))
    deciding = [sample for place, sample in enumerate(others) if place % 3 != 2]
    checking = [sample for place, sample in enumerate(others) if place % 3 == 2]
    if len(deciding) < len(ranking):
        deciding = [*ranking, *deciding]
    return ranking, deciding, [*checking, *held_out]


def _outputs(session: Any, samples: Sequence[Sample]) -> list[list[Any]]:
    """Return the outputs of a model for each sample."""
    names = [value.name for value in session.get_inputs()]
    return [
        session.run(None, {name: sample[name] for name in names if name in sample})
        for sample in samples
    ]


def _slowdown(reference: Any, other: Any, sample: Sample) -> float:
    """Return the runtime of a session relative to another, as medians of a few runs in turn.

    0 where the reference is too fast for a clock.
    """
    times: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(_RUNS):
        for place, session in enumerate((reference, other)):
            start = perf_counter()
            _outputs(session, [sample])
            times[place].append(perf_counter() - start)
    before, after = median(times[0]), median(times[1])
    return after / before if before > _LEAST_RUNTIME else 0.0


def _candidates(graph: Graph, settings: AutoMixedPrecision) -> dict[Node, None]:
    """Return the nodes that may be changed.

    Raises:
        ConfigError: names or operator types are given, and no node has one of them.
    """
    found = dict.fromkeys(graph.nodes)
    if settings.nodes or settings.op_types:
        named = Override(settings.nodes, settings.op_types, keep=True)
        found = matching(graph, named, strict=False)
        if not found:
            present = [node.name for node in graph.nodes] if settings.nodes else []
            wanted = (*settings.nodes, *settings.op_types)
            raise ConfigError(
                f"no node of the model is one of {', '.join(wanted)}, which"
                f" {settings.name} may change{nearest(wanted[0], present)}",
            )
    if not settings.exclude:
        return found
    excluded = matching(graph, Override(settings.exclude, keep=True), strict=False)
    return {node: None for node in found if node not in excluded}


def _number(found: Any, what: str) -> float:
    """Return what a function of the user returned.

    Raises:
        ConfigError: it is no number.
    """
    try:
        number = float(found)
    except (TypeError, ValueError):
        number = np.nan
    if np.isnan(number):
        raise ConfigError(
            f"{what} of auto_mixed_precision returned {found!r}; it must return a"
            " number",
        )
    return number


def describe(found: Sensitivity, settings: AutoMixedPrecision, nodes: int) -> list[str]:
    """What a report says of it."""
    unit = " dB"
    if settings.metric is not None or settings.distance is not None:
        unit = ""
    verb = "lowered" if settings.lowers else "raised"
    missed = "" if found.reached else ", missed"
    lines = [
        (
            f"auto_mixed_precision: {len(found.changed)} of {nodes} nodes {found.into},"
            f" {found.before:.2f} -> {found.after:.2f}{unit} (target"
            f" {settings.target:g}{unit}{missed})"
        ),
    ]
    if found.held_out is not None:
        sign = -1 if settings.distance is not None else 1
        lines.append(
            f"auto_mixed_precision: {sign * found.held_out:.2f}{unit} on {found.checked}"
            f" samples that nothing was decided by; {found.decided} decided",
        )
    if found.slowdown > _SLOWER:
        lines.append(
            f"auto_mixed_precision: the model with {found.into} takes about"
            f" {found.slowdown:.1f} times as long as the float model on this CPU; 16-bit"
            " nodes run on floats there, and pay on processors with 16-bit integers"
            " alone",
        )
    lines += [
        f"{verb} to {found.into}: {name} (alone {found.noise[name]:.2f}{unit})"
        for name in found.changed
    ]
    return lines
