"""Mixed precision: nodes with more or fewer bits, ranked by output error.

The output error of a node is the error when the node alone is quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from operator import itemgetter
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from onnx import ModelProto

from calibrators.onnx_runtime.session import feeds_of, open_session
from calibrators.onnx_runtime.turns import seconds_in_turns, single_runs
from quark_onnx.check.static_shapes import fixed
from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.common.progress import Progress, check_time
from quark_onnx.common.warnings_once import WarningsOnce
from quark_onnx.common.wording import counted
from quark_onnx.config import Override, QConfig
from quark_onnx.graph import Graph, Node
from quark_onnx.measuring.run_data import Planned
from quark_onnx.optimizers import AutoMixedPrecision, Samples
from quark_onnx.patterns.runtime import raised_runtime
from quark_onnx.plan import Plan, Quantize, matching, select
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.report.verdict.verdict import SLOWER
from quark_onnx.running.run import Reference, Sample
from quark_onnx.study.study import Study, bisected
from quark_onnx.trials.trial import Trial

#: Maximum number of changed nodes to try to restore, and of further nodes to try to lower.
_TRIES = 24
#: Maximum number of deciding and held-out samples, in addition to the ranking samples.
_OTHERS = 48
#: Least and greatest number of runs for a runtime, and seconds after which the least number
#: suffices.
_LEAST_RUNS, _MOST_RUNS, _SECONDS = 5, 50, 1.0
#: The least significant runtime in seconds.
_LEAST_RUNTIME = 1e-3
#: The least time that the report names, in milliseconds.
_LEAST_SHOWN = 0.001


@dataclass(frozen=True)
class Runtimes:
    """Minimum runtimes of one sample on this CPU, in seconds.

    Attributes:
        floating: runtime of the float model.
        plain: runtime of the quantized model without raised nodes.
        mixed: runtime of the quantized model with raised nodes.
    """

    floating: float
    plain: float
    mixed: float


@dataclass
class Sensitivity:
    """The result of the mixed-precision search.

    Attributes:
        noise: the output error of each node when it alone is quantized, or lowered: SQNR in dB,
            the user's metric, or a negative distance.
        changed: the nodes with more bits, the worst first; or with fewer bits, the least
            harmful first.
        before, after: the goal without and with changed nodes, on the deciding samples.
        bound: the least goal that meets the target.
        into: format of a changed node.
        decided: number of deciding samples, distinct from the ranking samples if the data
            suffices.
        models: number of models that were made and measured on the deciding samples.
        held_out: the goal without and with changed nodes on samples that nothing was chosen by;
            None without such samples.
        checked: number of these samples.
        prices: estimated additional runtime of each raised node, in nanoseconds per sample.
        runtimes: measured runtimes; None if not measured. No decision depends on them, so that
            equal input gives an equal model.
    """

    noise: dict[str, float] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    before: float = np.inf
    after: float = np.inf
    bound: float = -np.inf
    into: str = "float"
    decided: int = 0
    models: int = 0
    held_out: tuple[float, float] | None = None
    checked: int = 0
    prices: dict[str, float] = field(default_factory=dict)
    runtimes: Runtimes | None = None

    @property
    def reached(self) -> bool:
        """Whether the target is met, on samples that decided nothing if there are such samples."""
        after = self.after if self.held_out is None else self.held_out[1]
        return after >= self.bound


class Make(Protocol):
    """Makes the models of configurations; see ``ConfigTrials``."""

    planned: Planned
    reference: Reference

    def of(self, config: QConfig) -> Trial:
        """Return the model that a run with a configuration writes."""

    def proxy(self, config: QConfig) -> Trial:
        """Return a model that is made faster, whose error ranks nodes."""


def require_mixing(graph: Graph, config: QConfig, samples: Samples) -> None:
    """Check the optimizer that chooses formats, before anything is measured.

    Args:
        graph: the float graph.
        config: the settings.
        samples: calibration samples.

    Raises:
        ConfigError: the optimizer is given twice, there are no samples, or a setting of the
            optimizer does not fit the configuration or the model.
    """
    optimizers = _mixing(config)
    if not optimizers:
        return
    if len(optimizers) > 1:
        raise ConfigError(
            "auto_mixed_precision is given twice; one target is all that can be met",
        )
    if not len(samples):
        raise ConfigError(
            "auto_mixed_precision needs calibration data, to measure what each node"
            " does to the outputs",
        )
    optimizers[0].check(config)
    _candidates(graph, optimizers[0])


def _mixing(config: QConfig) -> list[AutoMixedPrecision]:
    return [
        optimizer
        for optimizer in config.optimizers
        if isinstance(optimizer, AutoMixedPrecision)
    ]


def mixed_plans(graph: Graph, config: QConfig) -> list[Plan]:
    """Return the plans whose ranges mixed precision needs, besides the one of the configuration.

    Args:
        graph: the float graph.
        config: the settings.
    """
    plans = list[Plan]()
    for settings in _mixing(config):
        if settings.of_weights:  # weights need no measurement
            continue
        # The user's decision to keep a node float stands.
        specs = select(graph, config, strict=False)
        names = tuple(node.name for node in graph.nodes if not specs[node].keep)
        plans.append(make_plan(graph, _with(config, settings, names), strict=False))
    return plans


def mix(
    trials: Make,
    settings: AutoMixedPrecision,
    samples: Samples,
    held_out: Sequence[Sample],
    show: bool | None = False,
) -> tuple[QConfig, Sensitivity]:
    """Return the configuration with the chosen formats of nodes, and the findings.

    Args:
        trials: makes the models.
        settings: the optimizer's target and limits.
        samples: calibration samples; the first few rank nodes, others decide.
        held_out: samples that no decision depends on.
        show: whether to show progress.
    """
    with WarningsOnce():
        return _Search(trials, settings, samples, held_out, show).run()


def _with(
    config: QConfig, settings: AutoMixedPrecision, names: tuple[str, ...]
) -> QConfig:
    """Return a configuration with an override for named nodes; unchanged without names."""
    if not names:
        return config
    return config.with_(overrides=(*config.overrides, settings.override(names, config)))


class _Search:
    def __init__(
        self,
        trials: Make,
        settings: AutoMixedPrecision,
        samples: Samples,
        held_out: Sequence[Sample],
        show: bool | None,
    ) -> None:
        """Split the samples; the arguments are those of ``mix``."""
        self._trials, self._settings, self._show = trials, settings, show
        self._graph, self._config = trials.planned.graph, trials.planned.config
        self._few, self._deciding, self._checking = _split(
            samples, settings.samples, held_out
        )
        self._candidates = _candidates(self._graph, settings)
        # The bisections ask for some sets of changed nodes twice.
        self._study = Study[tuple[str, ...], float](
            lambda names: self._measured(self._trial(names), self._deciding), key=tuple
        )

    def run(self) -> tuple[QConfig, Sensitivity]:
        """Rank the nodes, choose the nodes to change, and measure the result.

        Returns:
            The configuration with the chosen nodes changed, and the findings.
        """
        settings, result = self._settings, Sensitivity()
        result.into = settings.word(self._config)
        names = [node.name for node in self._graph.nodes if self._changeable(node)]
        result.before = result.after = self._goal(())
        bound = settings.target
        if settings.metric is not None:
            # The target of a metric is a loss against the float model.
            bound = self._metric(self._trials.reference.model) - settings.target
        elif settings.distance is not None:
            # Distances are negated, so that greater is better for every goal.
            bound = -settings.target
        result.bound = bound
        # Nothing to do: the target is met and nodes were to be raised, or missed and to be lowered.
        if (result.before >= bound) != settings.lowers or not names:
            self._check((), result)
            return self._config, result
        with Progress(self._show, len(names), "measuring nodes", "node") as bar:
            for done, name in enumerate(names, 1):
                result.noise[name] = self._alone(name)
                bar.update(done)
        # ties in graph order
        order = sorted(names, key=result.noise.__getitem__, reverse=settings.lowers)
        # The share refers to nodes with such weights, or to all nodes.
        whole = len(names) if settings.of_weights else len(self._graph.nodes)
        most = max(1, int(settings.share * whole))
        if settings.lowers:
            chosen = self._most(order, bound, most)
        else:
            chosen = self._raised(order, result.noise, bound, most)
            if self._goal(chosen) < bound:
                # The best of all that was tried; of equal ones the one with fewer changed nodes.
                tried = sorted(self._study.finished(), key=lambda pair: len(pair[0]))
                chosen = [*max(tried, key=itemgetter(1))[0]]
        result.changed, result.after = chosen, self._goal(chosen)
        self._check(chosen, result)
        return _with(self._config, settings, tuple(chosen)), result

    def _raised(
        self, order: list[str], noise: dict[str, float], bound: float, most: int
    ) -> list[str]:
        """Return the nodes to raise, by the choice with less estimated runtime.

        The first choice takes the noisiest nodes, the second the nodes with the most noise per
        runtime.

        Args:
            order: nodes, the noisiest first.
            noise: the goal where each node alone is quantized.
            bound: the minimum goal.
            most: maximum number of nodes.

        Returns:
            The names, the noisiest or the most profitable first; the goal may miss ``bound``.
        """
        plain = self._fewest(order[:most], bound)
        settings = self._settings
        if settings.metric or settings.distance or settings.of_weights:
            # noise is not additive there, or runtime does not change
            return self._needed(plain, bound)
        costs = self._prices(order)

        # Noise power relative to the signal, per nanosecond; at least 1 ns, because a node may cost
        # nothing.
        def worth(name: str) -> float:
            return float(10 ** (-noise[name] / 10) / max(costs[name], 1.0))

        def rank(chosen: list[str]) -> tuple[bool, float]:
            missed = self._goal(chosen) < bound
            return missed, sum(costs[name] for name in chosen)

        by_worth = sorted(order, key=worth, reverse=True)[:most]
        # One choice may meet the target where the other one misses it. Only the better one is
        # searched for nodes that it does not need, as each try makes and measures a model.
        better = min(plain, self._fewest(by_worth, bound), key=rank)
        return self._needed(better, bound)

    def _check(self, chosen: Sequence[str], result: Sensitivity) -> None:
        """Measure runtime and held-out accuracy of the chosen model.

        Args:
            chosen: names of the changed nodes.
            result: the findings with the changed nodes; the measurements are added in place.
        """
        result.decided = len(self._deciding)
        result.models = len(self._study.finished())
        settings = self._settings
        # The model without changed nodes, and the chosen one if it is another.
        trials = [self._trial(names) for names in dict.fromkeys([(), tuple(chosen)])]
        # A metric has data of its own.
        if self._checking and settings.metric is None:
            figures = [self._compared(trial, self._checking) for trial in trials]
            result.held_out = figures[0], figures[-1]
            result.checked = len(self._checking)
        # Prices are those of raised nodes; weights of more bits do not change the runtime.
        if result.changed and not settings.lowers and not settings.of_weights:
            result.prices = self._prices(result.changed)
            models = (self._graph.to_model(), *(trial.model for trial in trials))
            floating, plain, mixed = (
                open_session(model, threads=0) for model in models
            )
            result.runtimes = _runtimes((floating, plain, mixed), self._deciding[0])

    def _prices(self, names: Sequence[str]) -> dict[str, float]:
        """Return the estimated additional runtime of raised nodes, in nanoseconds per sample."""
        nodes = {node.name: node for node in self._sized_graph.nodes}
        return {name: raised_runtime(self._sized_graph, nodes[name]) for name in names}

    @cached_property
    def _sized_graph(self) -> Graph:
        """The graph with the sizes of a sample."""
        return _sized(self._graph, self._deciding[0])

    def _most(self, order: list[str], bound: float, most: int) -> list[str]:
        """Return the longest prefix of ``order`` that meets the bound, by bisection.

        A few later nodes are tried in addition.

        Args:
            order: nodes, the least harmful first.
        """
        end = min(len(order), most) + 1
        missed = bisected(0, end, lambda count: self._goal(order[:count]) < bound)
        chosen = order[: missed - 1]
        # The last node of the prefix that missed the bound is left out.
        for name in order[missed : missed + _TRIES]:
            if len(chosen) < most and self._goal([*chosen, name]) >= bound:
                chosen.append(name)
        return chosen

    def _fewest(self, order: list[str], bound: float) -> list[str]:
        """Return the shortest prefix of ``order`` that meets the bound, or all of it."""
        # The error is assumed to fall with each node.
        met = bisected(0, len(order), lambda count: self._goal(order[:count]) >= bound)
        return order[:met]

    def _needed(self, chosen: list[str], bound: float) -> list[str]:
        """Return the nodes that the bound needs, trying the least noisy first.

        Args:
            chosen: nodes in the order of the bisection, the least needed last.
            bound: the minimum goal; if ``chosen`` misses it, ``chosen`` is returned.
        """
        if self._goal(chosen) < bound:
            return chosen
        # Without the last node, the bisection has missed the bound already.
        for name in chosen[::-1][1 : 1 + _TRIES]:
            fewer = [kept for kept in chosen if kept != name]
            if self._goal(fewer) >= bound:
                chosen = fewer
        return chosen

    def _alone(self, name: str) -> float:
        """Return the goal with a single node quantized, or lowered, on ranking samples.

        For weight-only formats, only the weight of the node changes.
        """
        if self._settings.lowers:
            config = _with(self._config, self._settings, (name,))
        else:
            # ``nodes`` limits quantization to one node; all others compute in float.
            config = self._config.with_(nodes=(name,))
            if self._settings.of_weights:
                config = config.with_(activation=None)
        return self._measured(self._trials.proxy(config), self._few)

    def _changeable(self, node: Node) -> bool:
        """Return whether a node has a tensor to change."""
        if node not in self._candidates:
            return False
        plan = self._trials.planned.plan
        if not self._settings.of_weights:
            return plan.touches(node)
        # A node may read a weight of 8 bits or float already.
        for name in filter(self._graph.is_constant, node.inputs):
            entry = plan.entry(plan.use(name, node))
            if isinstance(entry, Quantize) and self._settings.narrow(entry.spec):
                return True
        return False

    def _goal(self, names: Sequence[str]) -> float:
        """Return the goal with changed nodes, on the deciding samples.

        Args:
            names: names of the changed nodes. A set of names is measured once per order.
        """
        # The bisections show no progress, which would end them with the time.
        check_time()
        return self._study.record_of(tuple(names))

    def _trial(self, names: Sequence[str]) -> Trial:
        """Return the model with changed nodes."""
        return self._trials.of(_with(self._config, self._settings, tuple(names)))

    def _measured(self, trial: Trial, samples: Sequence[Sample]) -> float:
        """Return the goal of a model: the user's metric, a negated distance, or SQNR in dB."""
        if self._settings.metric is not None:
            return self._metric(trial.model)
        return self._compared(trial, samples)

    def _compared(self, trial: Trial, samples: Sequence[Sample]) -> float:
        """Return the goal of a model, computed from outputs on samples.

        Returns:
            The least SQNR over the outputs in dB, or the negated distance of the user's function.
        """
        if self._settings.distance is None:
            return trial.sqnr(samples)
        distance = self._settings.distance(
            _outputs(self._trials.reference.remembering, samples),
            _outputs(trial.session, samples),
        )
        return -_number(distance, "distance")

    def _metric(self, model: ModelProto) -> float:
        assert self._settings.metric is not None
        return _number(self._settings.metric(model), "metric")


def _split(
    samples: Samples, few: int, held_out: Sequence[Sample]
) -> tuple[list[Sample], list[Sample], list[Sample]]:
    """Split samples into ranking, deciding and held-out samples.

    The first ``few`` rank. Two of three of the rest decide; if too few remain, the ranking
    samples decide as well.

    Args:
        samples: the calibration samples, read once and at most up to a limit.
        few: number of ranking samples.
        held_out: samples held out before, which are added to the third list.
    """
    # An iterator, so that each sample is read once, in order.
    remaining = iter(samples)
    ranking = list(islice(remaining, few))
    deciding = list(islice(remaining, _OTHERS))
    checking = deciding[2::3]
    del deciding[2::3]
    # Few decisions would be made by chance otherwise.
    if len(deciding) < len(ranking):
        deciding = [*ranking, *deciding]
    return ranking, deciding, [*checking, *held_out]


def _outputs(session: Any, samples: Sequence[Sample]) -> list[list[Any]]:
    """Return the outputs of a model for every sample, in the order of the model."""
    return [session.run(None, feeds_of(session, sample)) for sample in samples]


def _sized(graph: Graph, sample: Sample) -> Graph:
    """Return the graph with the sizes of a sample in place of dynamic dimensions.

    Args:
        graph: the graph; returned unchanged if it is static, or if the sizes contradict it.
    """
    shapes = dict[str, tuple[int, ...]]()
    for value in graph.inputs:
        array = sample.get(value.name)
        if isinstance(array, np.ndarray) and not graph.has_static_shape(value.name):
            shapes[value.name] = array.shape
    if not shapes:
        return graph
    try:
        return fixed(graph, shapes)[0]
    except ConfigError:  # dimensions of one name with different sizes
        return graph


def _runtimes(sessions: tuple[Any, Any, Any], sample: Sample) -> Runtimes | None:
    """Return the runtimes of the float, the quantized and the mixed model, in seconds.

    Each is the minimum of alternating runs, the least disturbed. None where the float model is too
    fast for a clock.
    """
    models = [partial(_seconds_of_runs, session, sample) for session in sessions]
    seconds = seconds_in_turns(models, single_runs(_SECONDS, _LEAST_RUNS, _MOST_RUNS))
    # In the order of ``sessions``.
    floating, plain, mixed = map(min, seconds)
    if floating <= _LEAST_RUNTIME:
        return None
    return Runtimes(floating, plain, mixed)


def _seconds_of_runs(session: Any, sample: Sample, runs: int) -> list[float]:
    """Return the seconds of some runs of a model on a sample.

    Args:
        runs: number of runs, timed one by one.
    """
    seconds = []
    for _ in range(runs):
        start = perf_counter()
        _outputs(session, [sample])
        seconds.append(perf_counter() - start)
    return seconds


def _candidates(graph: Graph, settings: AutoMixedPrecision) -> dict[Node, None]:
    """Return the nodes that may be changed, as an ordered set.

    Args:
        settings: the optimizer, with the nodes or types to change and those to exclude.

    Raises:
        ConfigError: no node has a configured name or operator type.
    """
    candidates = dict.fromkeys(graph.nodes)
    if settings.nodes or settings.op_types:
        named = Override(settings.nodes, settings.op_types, keep=True)
        candidates = matching(graph, named, strict=False)
        if not candidates:
            names = [node.name for node in graph.nodes] if settings.nodes else []
            wanted = (*settings.nodes, *settings.op_types)
            raise ConfigError(
                f"no node of the model is one of {', '.join(wanted)}, which"
                f" {settings.name} may change{nearest(wanted[0], names)}",
            )
    if not settings.exclude:
        return candidates
    # Patterns of exclusions may match nothing.
    excluded = matching(graph, Override(settings.exclude, keep=True), strict=False)
    return dict.fromkeys(node for node in candidates if node not in excluded)


def _number(found: Any, what: str) -> float:
    """Return the result of a user's function as a float.

    Args:
        what: the setting with the function, "metric" or "distance", for the message.

    Raises:
        ConfigError: the result is not a number.
    """
    try:
        number = float(found)
    except (TypeError, ValueError):
        number = np.nan
    # NaN compares as neither better nor worse, and would end the bisections anywhere.
    if np.isnan(number):
        raise ConfigError(
            f"{what} of auto_mixed_precision returned {found!r}; it must return a"
            " number",
        )
    return number


def describe(found: Sensitivity, settings: AutoMixedPrecision, nodes: int) -> list[str]:
    """Return the notes for the report.

    Args:
        found: the findings.
        settings: the optimizer, which decides the unit and the sign of the goal.
        nodes: number of nodes of the model.
    """
    unit = " dB"
    if settings.metric is not None or settings.distance is not None:
        unit = ""
    verb = "lowered" if settings.lowers else "raised"
    missed = "" if found.reached else ", missed"
    goal = f"(target {settings.target:g}{unit}{missed})"
    # Distances were negated for the search.
    sign = -1 if settings.distance is not None else 1

    def change(before: float, after: float) -> str:
        return f"{sign * before:.2f} -> {sign * after:.2f}{unit}"

    count = f"auto_mixed_precision: {len(found.changed)} of {counted(nodes, 'node')} {found.into}"
    deciding = change(found.before, found.after)
    models = counted(found.models, "model")
    if found.held_out is not None:
        samples = counted(found.checked, "sample")
        lines = [
            f"{count}, {change(*found.held_out)} on {samples} that nothing was decided by {goal}",
            f"auto_mixed_precision: {deciding} on the {found.decided} that decided between"
            f" {models}",
        ]
    elif settings.metric is not None:
        lines = [f"{count}, {deciding} {goal}, the best of {models}"]
    else:
        samples = counted(found.decided, "sample")
        lines = [
            f"{count}, {deciding} {goal} on the {samples} that decided between {models}: new"
            " samples may be worse"
        ]
    if not found.changed:
        lines.append(f"auto_mixed_precision: {_unchanged(found, settings)}")
    lines += _runtime_notes(found, settings)
    for name in found.changed:
        figure = f"alone {sign * found.noise[name]:.2f}{unit}"
        if name in found.prices:
            figure += f"; {_milliseconds(found.prices[name])} more, estimated"
        lines.append(f"{verb} to {found.into}: {name} ({figure})")
    return lines


def _unchanged(found: Sensitivity, settings: AutoMixedPrecision) -> str:
    """Return why the search changed no node."""
    if found.noise:
        if settings.lowers:
            return (
                "nothing is lowered, as every choice that was tried misses the target"
            )
        return "nothing is raised, as no choice that was tried is better"
    met = found.before >= found.bound
    if met and not settings.lowers:
        return "nothing is raised, as the target is met without"
    if not met and settings.lowers:
        return "nothing is lowered, as the target is missed without"
    return "no node has a tensor to change"


def _runtime_notes(found: Sensitivity, settings: AutoMixedPrecision) -> list[str]:
    """Return the measured price of raised nodes, and a warning where floats are faster."""
    runtimes = found.runtimes
    if runtimes is None:
        return []
    lines = [
        f"auto_mixed_precision: a sample takes {_milliseconds(1e9 * runtimes.mixed)} with"
        f" the raised nodes and {_milliseconds(1e9 * runtimes.plain)} without, measured"
        " on this CPU",
    ]
    slowdown = runtimes.mixed / runtimes.floating
    if slowdown > SLOWER:
        reason = ""
        if settings.to != "float":
            reason = (
                "; 16-bit nodes run on floats there, and pay on processors with 16-bit"
                " integers alone"
            )
        lines.append(
            f"auto_mixed_precision: the model with {found.into} takes about"
            f" {slowdown:.1f} times as long as the float model on this CPU{reason}",
        )
    return lines


def _milliseconds(nanoseconds: float) -> str:
    """Return a time with two digits, of 0.001 ms at least."""
    milliseconds = nanoseconds / 1e6
    if milliseconds < _LEAST_SHOWN:
        return f"{_LEAST_SHOWN} ms"
    if milliseconds < 100:
        return f"{milliseconds:.2g} ms"
    return f"{milliseconds:,.0f} ms"
