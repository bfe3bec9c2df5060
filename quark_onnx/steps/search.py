"""search: settle scales by the error at the model's outputs.

A power-of-two scale moves by octaves, so the one with the least error on the tensor itself is often not the one that
serves the model: clipping the few large values of a layer and halving the step of all others look alike to a squared
error, but not to what follows. Here every scale is tried an octave up and down while all others stay, on a model whose
scales are inputs, and a move is kept if the outputs come closer to the float ones.

Float scales of activations are moved in the same way, by a quarter of an octave: which of the calibrators would have
been right is decided for each tensor by what matters in the end. A zero point stays, so that a range keeps its shape.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, ValueInfoProto

from calibrators.session import open_session
from quark_onnx.errors import ConstraintError
from quark_onnx.graph import Graph, Node
from quark_onnx.plan import Plan, Quantize, Use
from quark_onnx.progress import Progress
from quark_onnx.steps.insert import insert_live
from quark_onnx.steps.run import Sample
from quark_onnx.steps.settle import Limits
from quark_onnx.steps.solve import Params

logger = logging.getLogger(__name__)

Scales = dict[Use, NDArray[np.float32]]

#: A sample counts as right from this share of noise on: no single good sample outweighs the others.
_FLOOR = 1e-3
#: Steps down and up, of scales that are powers of two and of those that are not.
_OCTAVE, _QUARTER = (0.5, 2.0), (2**-0.25, 2**0.25)
#: Operators behind which an output is judged by what they read: they only move values.
_PUT_TOGETHER = frozenset({"Concat", "Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
#: The least normal number.
_SMALLEST = np.finfo(np.float32).tiny
#: A move has to lower the mean logarithm of the noise by this much; less is within the luck of few samples.
_GAIN = 2e-3
#: So many samples are run before it is asked whether the others are worth it: not if they are worse by this much.
_AT_ONCE, _SLACK = 2, 0.02


def search(
    graph: Graph, plan: Plan, params: Params, limits: Limits, samples: Sequence[Sample], show: bool | None
) -> int:
    """Move the symmetric power-of-two scales in ``params``, and the float ones of activations; how many have moved.

    Args:
        limits: what a target asks of the scales: others move along with the one that is tried.
        samples: the few samples that the error is measured on.
        show: whether to show a progress bar, as ``Progress`` takes it.
    """
    order = _order(graph)
    movable = sorted(
        (use for use in params.table if _factors(graph, plan, use)), key=lambda use: order.get(use, len(order))
    )
    if not movable or not samples:
        return 0
    bound = [use for use in limits.uses if use not in movable]
    live, names = insert_live(graph, plan, params, [*movable, *bound])
    movable = [use for use in movable if names[use]]  # what nobody reads has no scale in the graph
    try:
        probe = _Probe(graph, live, samples)
    except Exception as error:  # onnxruntime raises several unrelated types; without a search the scales are good too
        logger.warning("the scales are not searched, the model with its scales as inputs does not run: %s", error)
        return 0
    if not probe.usable:
        logger.warning("the scales are not searched: on a sample no output is finite and other than zero")
        return 0
    start = {use: np.asarray(params.table[use].scale) for use in (*movable, *bound)}
    fed = [use for use in start if names[use]]

    def noise_of(scales: Scales, best: list[float]) -> list[float]:
        return probe.noise({names[use]: scales[use] for use in fed}, best)

    scales, best = dict(start), noise_of(start, [])
    with Progress(show, len(movable), "searching scales", "scale") as progress:
        for done, use in enumerate(movable):
            for factor in _factors(graph, plan, use):
                moved = False
                while (trial := _moved(scales, use, factor, limits)) and _better(noise := noise_of(trial, best), best):
                    scales, best, moved = trial, noise, True
                if moved:
                    break
            progress.update(done + 1)
    probe.close()
    for use, scale in scales.items():
        params.table[use] = params.table[use].with_scale(scale)
    return sum(bool((scales[use] != start[use]).any()) for use in start)


def _order(graph: Graph) -> dict[Use, int]:
    """A place for each use that follows from the graph alone, not from the order in which a file lists its nodes.

    Tensors are counted as they are reached from the outputs, what a node reads before what it computes.
    """
    places, done = dict[Use, int](), set[Node]()
    stack = [(node, False) for value in reversed(graph.outputs) if (node := graph.producer(value.name))]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if not ready:
            stack.append((node, True))
            before = [graph.producer(tensor) for tensor in reversed(node.inputs)]
            stack += [(other, False) for other in before if other is not None and other not in done]
            continue
        done.add(node)
        for tensor in node.inputs:
            for use in (Use(tensor), Use(tensor, node.name)):
                places.setdefault(use, len(places))
        for tensor in node.outputs:
            places.setdefault(Use(tensor), len(places))
    return places


def _factors(graph: Graph, plan: Plan, use: Use) -> tuple[float, ...]:
    """By what the scale of a use may be multiplied; empty if it stays."""
    entry = plan.entries.get(use)
    if not isinstance(entry, Quantize) or entry.bounds is not None or entry.spec.scale != "float32":
        return ()
    if entry.spec.pow2:
        return _OCTAVE if entry.spec.symmetric else ()
    single = entry.axis is None and entry.spec.dtype.uniform and not graph.is_constant(use.tensor)
    return _QUARTER if single else ()


def _moved(scales: Scales, use: Use, factor: float, limits: Limits) -> Scales:
    """The scales with one of them multiplied, and with others so that the target can compute with it.

    Empty if one would leave the normal numbers, or the one that is tried would move back.
    """
    tied = limits.tied(use)
    trial = scales | {each: np.asarray(scales[each] * np.float32(factor), np.float32) for each in tied}
    if not all(np.isfinite(trial[each]).all() and (trial[each] >= _SMALLEST).all() for each in tied):
        return {}
    try:
        others = limits.settled({each: float(trial[each]) for each in limits.uses})
    except ConstraintError:
        return {}
    if not others.keys().isdisjoint(tied):
        return {}
    return trial | {each: np.full_like(trial[each], scale) for each, scale in others.items()}


def _better(noise: list[float], best: list[float]) -> bool:
    return len(noise) == len(best) and float(np.mean(noise)) < float(np.mean(best)) - _GAIN


class _Probe:
    """The float outputs of the samples, and how far a choice of scales is from them."""

    def __init__(self, graph: Graph, live: Graph, samples: Sequence[Sample]) -> None:
        judged = _parts(graph)
        session = open_session(_with_outputs(graph, [tensor for tensor, _ in judged]))
        read = [_as_read(live, tensor, reader) for tensor, reader in judged]
        self._session = open_session(_with_outputs(live, read), threads=1)  # several samples run side by side
        self._samples = samples
        self._references: list[list[tuple[int, NDArray[np.float64]]]] = []
        for sample in samples:
            values = session.run(None, dict(sample))
            self._references.append([(place, v.astype(np.float64)) for place, v in enumerate(values) if _measurable(v)])
        self.usable = all(self._references)
        self._pool = ThreadPoolExecutor(_AT_ONCE)

    def noise(self, scales: dict[str, NDArray[np.float32]], best: list[float]) -> list[float]:
        """For each sample, the mean over outputs of the logarithm of noise over signal.

        Fewer samples where the first few are worse than ``best``, what was found before: nothing more can come of that.
        """
        found = list[float]()
        for start in range(0, len(self._samples), _AT_ONCE):
            some = range(start, min(len(self._samples), start + _AT_ONCE))
            found += self._pool.map(lambda place: self._one(scales, place), some)
            if best and np.mean(found) > np.mean(best[: len(found)]) + _SLACK:
                break
        return found

    def _one(self, scales: dict[str, NDArray[np.float32]], place: int) -> float:
        values, shares = self._session.run(None, {**self._samples[place], **scales}), []
        for output, reference in self._references[place]:
            error = np.square(values[output] - reference).sum() / np.square(reference).sum()
            shares.append(np.log(error + _FLOOR) if np.isfinite(error) else np.inf)
        return float(np.mean(shares))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _parts(graph: Graph) -> list[tuple[str, Node | None]]:
    """The tensors that outputs are put together from, with a node that reads them; None for an output.

    In one tensor with large coordinates the scores of a detector would count for nothing.
    """
    found, todo = dict[str, Node | None](), list[tuple[str, Node | None]]()
    todo += [(value.name, None) for value in reversed(graph.outputs)]
    while todo:
        tensor, reader = todo.pop()
        node = graph.producer(tensor)
        if node is None or node.kind not in _PUT_TOGETHER:
            if not graph.is_constant(tensor):
                found.setdefault(tensor, reader)
            continue
        inputs = node.inputs if node.kind == "Concat" else node.inputs[:1]
        todo += [(name, node) for name in reversed(inputs)]
    return list(found.items())


def _as_read(live: Graph, tensor: str, reader: Node | None) -> str:
    """The tensor as its reader sees it once it is rounded; the name of an output stays."""
    if reader is None:
        return tensor
    node = next(node for node in live.nodes if node.name == reader.name)
    return node.inputs[reader.inputs.index(tensor)]


def _with_outputs(graph: Graph, tensors: list[str]) -> ModelProto:
    """The model with other outputs, of any type that onnxruntime finds."""
    model = graph.to_model()
    del model.graph.output[:]
    model.graph.output.extend(ValueInfoProto(name=name) for name in tensors)
    return model


def _measurable(value: Any) -> bool:
    floating = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return bool(floating and np.isfinite(value).all() and value.any())
