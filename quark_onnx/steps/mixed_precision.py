"""Raise or lower the bits of nodes, ranked by the output error that each node causes alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from onnx import ModelProto

from calibrators import Statistic
from calibrators.onnx_runtime.session import open_session
from quark_onnx.config import Override, QConfig
from quark_onnx.errors import ConfigError, nearest
from quark_onnx.graph import Graph, Node
from quark_onnx.optimizers import AutoMixedPrecision, Samples
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


@dataclass
class Sensitivity:
    """What was found.

    Attributes:
        noise: the error at the outputs that each node causes when it alone is quantized, or
            lowered; in dB of SQNR, by the user's metric, or as a negative distance.
        changed: the nodes that get more bits, the worst first; or fewer, the least harmful first.
        before, after: the goal without changed nodes, and with them.
        reached: whether that meets the target.
        into: what becomes of a changed node.
    """

    noise: dict[str, float] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    before: float = np.inf
    after: float = np.inf
    reached: bool = True
    into: str = "float"


def mix(
    graph: Graph,
    config: QConfig,
    samples: Samples,
    *,
    keyed: Keyed | None = None,
    show: bool | None = False,
) -> tuple[QConfig, Sensitivity | None]:
    """Return the configuration with an override for the nodes that need other bits, and what was
    found.

    Without the optimizer in the configuration, that is returned as it is.

    Args:
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
    return _Search(graph, config, found[0], samples, keyed, show).run()


class _Search:
    def __init__(  # noqa: PLR0913
        self,
        graph: Graph,
        config: QConfig,
        settings: AutoMixedPrecision,
        samples: Samples,
        keyed: Keyed | None,
        show: bool | None,
    ) -> None:
        self._graph, self._config, self._settings, self._show = (
            graph,
            config,
            settings,
            show,
        )
        self._few: list[Sample] = list(islice(iter(samples), settings.samples))
        self._float = open_session(graph.to_model())
        self._expected: list[list[Any]] = []
        if settings.distance is not None:
            self._expected = self._outputs(self._float)
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
                result.noise[name] = (
                    self._goal((name,)) if settings.lowers else self._alone(name)
                )
                bar.update(done)
        # those alike in the order of the graph
        order = sorted(names, key=result.noise.__getitem__, reverse=settings.lowers)
        whole = len(names) if settings.of_weights else len(self._graph.nodes)
        most = max(1, int(settings.share * whole))
        if settings.lowers:
            chosen = self._most(order, bound, most)
        else:
            chosen = self._needed(self._fewest(order[:most], bound), bound)
        result.changed, result.after = chosen, self._goal(tuple(chosen))
        result.reached = result.after >= bound
        return self._with(tuple(chosen)), result

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
        """The goal where one node alone is quantized; of weights, where its weight alone is."""
        config = self._config.with_(nodes=(name,))
        config = config.with_(activation=None) if self._settings.of_weights else config
        return self._measured(self._plan_of(config))

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
            self._goals[names] = self._measured(self._plan_of(self._with(names)))
        return self._goals[names]

    def _plan_of(self, config: QConfig) -> Plan:
        return make_plan(
            self._graph,
            config,
            strict=False,
            shapes=self._plans[0].shapes,
        )

    def _measured(self, plan: Plan) -> float:
        model = self._built(plan)
        if self._settings.metric is not None:
            return self._metric(model)
        if self._settings.distance is not None:
            found = self._settings.distance(
                self._expected,
                self._outputs(open_session(model)),
            )
            return -_number(found, "distance")
        errors = measure(self._float, open_session(model), self._few)
        return least_sqnr(errors, np.inf)

    def _metric(self, model: ModelProto) -> float:
        assert self._settings.metric is not None
        return _number(self._settings.metric(model), "metric")

    def _outputs(self, session: Any) -> list[list[Any]]:
        """Return the outputs of a model for each sample."""
        names = [value.name for value in session.get_inputs()]
        return [
            session.run(None, {name: sample[name] for name in names if name in sample})
            for sample in self._few
        ]

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
    lines += [
        f"{verb} to {found.into}: {name} (alone {found.noise[name]:.2f}{unit})"
        for name in found.changed
    ]
    return lines
