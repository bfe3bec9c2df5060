"""Layer-wise optimization of codes and biases.

An optimizer gets a layer's inputs in the model whose earlier layers are already quantized and
optimized, and target outputs of the float model. Each model runs once in total, segment by
segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import numpy as np

from quark_onnx.common.errors import ModelError, QuarkError
from quark_onnx.common.progress import Progress
from quark_onnx.common.wording import counted, prefixed
from quark_onnx.graph import Graph
from quark_onnx.kernels.levels import Levels
from quark_onnx.kernels.threads import one_thread
from quark_onnx.optimizers import LayerOptimizer, Samples
from quark_onnx.optimizers.problem import Floats, LayerResult, RoundingProblem, Solution
from quark_onnx.plan import BiasOf, Plan, Use
from quark_onnx.refine.calibration_rows import Room
from quark_onnx.refine.layer_problems import (
    LayerTask,
    RowCollector,
    bias_lattice_of,
    flat,
    lattice_of,
    places_in,
    scalable,
    summand_of,
)
from quark_onnx.refine.layer_stream import LayerStream
from quark_onnx.refine.resume import Journal
from quark_onnx.refine.stored_activation import StoredActivation, store_activation
from quark_onnx.running.function_bodies import define_functions
from quark_onnx.scales.compute_qparams import Params
from quark_onnx.writing.insert import insert

#: Bytes of activations per model kept in memory between layers; the rest is stored in files.
_MEMORY = 1 << 29


@dataclass
class Refinement:
    """The optimized layers, and notes for the report."""

    layers: list[LayerResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def refine(  # noqa: PLR0913
    graph: Graph,
    plan: Plan,
    params: Params,
    optimizers: Sequence[LayerOptimizer],
    samples: Samples,
    *,
    show: bool | None = False,
    resume: Path | None = None,
) -> Refinement:
    """Replace weights and biases in ``graph`` by optimized ones.

    The weights are dequantized values of their codes.

    Args:
        graph: the float graph; changed in place.
        plan: the plan of the graph.
        params: the scales; changed in place where an optimizer multiplies scales.
        optimizers: optimizers, applied in order.
        samples: calibration samples; one in eight is held out.
        show: whether to show a progress bar, as ``Progress`` takes it.
        resume: a folder for finished layers, from which an equal run resumes.

    Returns:
        A result per optimized layer, and notes on the others.

    Raises:
        ModelError: the graph does not run segment by segment.
    """
    tasks, skipped = places_in(graph, plan, params)
    result = Refinement(notes=prefixed("not optimized: ", skipped))
    if not tasks:
        result.notes.append("no layer has codes to be chosen")
        return result
    journal = Journal(resume, optimizers, samples)
    run = _Run(graph, plan, params, tasks, samples, journal)
    try:
        with (
            one_thread(),
            Progress(show, len(tasks), "optimizing layers", "layer") as bar,
        ):
            for done, task in enumerate(tasks, 1):
                if run.selects_others(task):
                    result.notes.append(
                        f"not optimized: {task.node.name}: the data decides which rows"
                        " it reads",
                    )
                    bar.update(done)
                    continue
                result.layers.append(run.optimize(task, optimizers))
                if not result.layers[-1].changed:
                    result.notes.append(
                        f"not optimized: {task.node.name}: the data has too few rows"
                        " for it",
                    )
                bar.update(done)
    finally:
        run.close()
    result.notes += _summary(result.layers, optimizers)
    return result


class _Run:
    """The float and the quantized model in segment-wise inference."""

    def __init__(  # noqa: PLR0913
        self,
        graph: Graph,
        plan: Plan,
        params: Params,
        tasks: list[LayerTask],
        samples: Samples,
        journal: Journal,
    ) -> None:
        """Quantize the layers with round to nearest, and open both models.

        Args:
            graph: the float graph; solved weights and biases are written to it.
            params: the scales; changed in place where an optimizer multiplies scales.
            tasks: the layers to optimize, in graph order.
            journal: solutions of an earlier, interrupted run.
        """
        self._plan, self._params, self._journal = plan, params, journal
        self._target = graph
        self._float = graph.copy()
        # Weights of these layers stay float tensors, whose values are replaced by dequantized
        # codes.
        self._quantized = insert(graph, _open(plan, tasks), params)
        define_functions(self._quantized)
        # Until a layer's turn comes, it computes with round to nearest, as in the final model
        # without optimizers.
        for task in tasks:
            self._store_weight(
                task,
                self._lattice(task).nearest(flat(task.layer.weight(self._float))),
                self._quantized,
            )
        self._nodes = {node.name: node for node in self._quantized.nodes}
        self._rooms = (Room(), Room())
        self._walks = [
            LayerStream(model, samples, memory=_MEMORY)
            for model in (self._float, self._quantized)
        ]

    def _lattice(self, task: LayerTask) -> Levels:
        return lattice_of(self._float, self._plan, self._params, task)

    def selects_others(self, task: LayerTask) -> bool:
        """Return whether a layer reads other rows than in the float model.

        That happens if values decide the number of rows.
        """
        source = task.node.input(0)
        if not self._plan.shapes.sized_by_data(source):
            return False
        floating, quantized = self._walks
        # The name of the input in the quantized graph, where pairs have renamed tensors.
        stored = store_activation(quantized, self._nodes[task.node.name].input(0))
        floating.reach(source)
        quantized.reach(stored.name)
        return floating.shapes(source) != quantized.shapes(stored.name)

    def optimize(
        self, task: LayerTask, optimizers: Sequence[LayerOptimizer]
    ) -> LayerResult:
        """Choose and store the codes and the bias of one layer.

        Args:
            task: the layer. Layers come in graph order, as inference does not go back.

        Returns:
            The losses before and after, and the number of outputs that each optimizer changed.

        Raises:
            ModelError: the layer's input in the quantized model does not fit its float result, or a
                segment does not run.
        """
        floating, quantized = self._walks
        source = store_activation(quantized, self._nodes[task.node.name].input(0))
        quantized.reach(source.name)
        wanted = [task.result]
        if any(optimizer.reads_mean for optimizer in optimizers):
            wanted.append(task.node.input(0))
        floating.reach(*wanted)
        # Both at once, as ``reach`` drops tensors without further readers.
        if beside := self._beside(task):
            quantized.reach(source.name, beside[1].name)
        rows = RowCollector(task, source, floating, quantized, self._rooms, beside)
        # Not hash(), which differs from process to process.
        seed = crc32(task.node.name.encode())
        bias_lattice = bias_lattice_of(self._float, self._plan, self._params, task)
        free = scalable(self._plan, self._params, task)
        try:
            problem = rows.problem(self._lattice(task), bias_lattice, free, seed)
        except QuarkError:  # some of them are a ValueError
            raise
        except (IndexError, ValueError) as error:
            read = quantized.shapes(source.name)[0]
            computed = floating.shapes(task.result)[0]
            raise ModelError(
                f"layer {task.node.name!r} reads a tensor of shape {read} in the"
                f" quantized model, which does not make its result of shape {computed} in"
                f" the float model: {error}",
            ) from error
        key = self._journal.key(problem)
        # The problem is computed even so: its rows are a part of the key.
        solved = self._journal.find(key, problem)
        if solved is None:
            solved = best_solution(problem, optimizers)
            self._journal.keep(key, *solved)
        solution, result = solved
        self._store_weight(task, solution.weight, self._quantized, self._target)
        if solution.factor is not None:
            # Factors are (groups, outputs); scales have the channels in the same order.
            before = self._params.table[task.use]
            self._params.table[task.use] = before.with_scale(
                before.scale * solution.factor.reshape(-1),
            )
        if task.bias:
            shape = self._float.shape(task.bias)
            assert shape is not None
            bias = solution.bias.astype(np.float32).reshape(
                [int(dim or 0) for dim in shape],
            )
            self._target.set_constant(task.bias, bias)
            if self._quantized.is_constant(task.bias):
                self._quantized.set_constant(task.bias, bias)
        return result

    def _beside(self, task: LayerTask) -> tuple[str, StoredActivation] | None:
        """Return the other summand of a layer's result, in both models.

        Returns:
            The name in the float graph, and the storage in the quantized one; None without another
            summand, or if the summand is not computed yet.
        """
        addition = summand_of(self._float, task)
        if addition is None:
            return None
        node, index = addition
        summand = node.inputs[index]
        floating, quantized = self._walks
        # Tensors that the float model has computed so far depend on optimized layers only.
        if not floating.known(summand):
            return None
        stored = store_activation(quantized, self._nodes[node.name].input(index))
        return summand, stored

    def close(self) -> None:
        for walk in self._walks:
            walk.close()

    def _store_weight(self, task: LayerTask, weight: Floats, *graphs: Graph) -> None:
        """Write a weight into graphs.

        Args:
            weight: dequantized values, (groups, outputs, inputs).
            *graphs: the graphs, in which the weight has the same name.
        """
        stored = task.layer.as_stored(
            weight.reshape(task.layer.shape(self._float)),
        ).astype(np.float32)
        for graph in graphs:
            graph.set_constant(task.weight, stored)


def _open(plan: Plan, tasks: list[LayerTask]) -> Plan:
    """Return the plan with float weights and biases where codes are to be chosen."""
    weights = {task.use for task in tasks}
    biases = {Use(task.bias) for task in tasks}
    return plan.without(BiasOf, uses=weights | biases)


@np.errstate(over="ignore", invalid="ignore")  # a NaN loss is never better
def best_solution(
    problem: RoundingProblem, optimizers: Sequence[LayerOptimizer]
) -> tuple[Solution, LayerResult]:
    """Return the best solution of the optimizers, chosen per output.

    Args:
        problem: the layer, its inputs and its targets.
        optimizers: optimizers, applied in order; each starts from the best solution so far.

    Returns:
        The solution, which is round to nearest where no optimizer lowers the held-out loss of an
        output, and its losses. ``changed`` of the result is empty if the samples leave no rows.
    """
    solution = problem.nearest()
    loss = nearest_loss = problem.loss(solution)
    changed = dict[str, int]()
    # Samples of which no row is finite leave no rows.
    usable = len(problem.train) and len(problem.held)
    for optimizer in optimizers if usable else ():
        proposal = problem.allowed(optimizer(problem, solution))
        new_loss = problem.loss(proposal)
        # An equal proposal must not count as a change: its loss differs by float noise.
        differs = (proposal.weight != solution.weight).any(axis=2)
        differs |= proposal.bias != solution.bias
        better = differs & (new_loss < loss)
        changed[optimizer.name] = max(changed.get(optimizer.name, 0), int(better.sum()))
        solution = solution.chosen(proposal, better)
        loss = np.where(better, new_loss, loss)
    result = LayerResult(
        problem.name,
        float(nearest_loss.mean()),
        float(loss.mean()),
        int(loss.size),
        changed,
    )
    return solution, result


def _summary(
    layers: list[LayerResult], optimizers: Sequence[LayerOptimizer]
) -> list[str]:
    """Return the notes on the layers together.

    Returns:
        The number of layers in which each optimizer is kept, and the geometric mean of the loss
        ratios against round to nearest.
    """
    notes = list[str]()
    for optimizer in optimizers:
        used = sum(layer.changed.get(optimizer.name, 0) > 0 for layer in layers)
        notes.append(
            f"{optimizer.name}: kept in {used} of {counted(len(layers), 'layer')}"
        )
    # A layer without an error under RTN has no ratio.
    shares = [layer.after / layer.before for layer in layers if layer.before > 0]
    if shares:
        # The geometric mean, so that halving one layer's error cancels doubling another's.
        mean = float(np.exp(np.mean(np.log(np.maximum(shares, 1e-12)))))
        notes.append(
            f"error of a layer on samples held out: {mean:.3f} times that of rounding"
            " to nearest",
        )
    return notes
