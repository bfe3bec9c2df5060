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

import numpy as np
from numpy.typing import NDArray

from quark_onnx.errors import ConstraintError
from quark_onnx.graph import Graph, Node
from quark_onnx.plan import Plan, Quantize, Use
from quark_onnx.progress import Progress
from quark_onnx.steps.insert import insert_live
from quark_onnx.steps.run import Sample
from quark_onnx.steps.settle import Limits
from quark_onnx.steps.solve import Params
from quark_onnx.steps.trial import Probe

logger = logging.getLogger(__name__)

Scales = dict[Use, NDArray[np.float32]]

#: Steps down and up, of scales that are powers of two and of those that are not.
_OCTAVE, _QUARTER = (0.5, 2.0), (2**-0.25, 2**0.25)
#: The least normal number.
_SMALLEST = np.finfo(np.float32).tiny
#: A move has to lower the mean logarithm of the noise by this much, and by so many of its standard errors: where codes
#: are coarse, any change of a rounding changes the noise of every sample, for better or worse.
_GAIN, _CERTAIN = 2e-3, 0.5


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
        probe = Probe(graph, live, samples)
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

    with probe, Progress(show, len(movable), "searching scales", "scale") as progress:
        scales, best = dict(start), noise_of(start, [])
        for done, use in enumerate(movable):
            if probe.freeze({names[each]: scales[each] for each in fed}, [names[each] for each in movable[done:]]):
                best = noise_of(scales, [])
            for factor in _factors(graph, plan, use):
                moved = False
                while (trial := _moved(scales, use, factor, limits)) and _better(noise := noise_of(trial, best), best):
                    scales, best, moved = trial, noise, True
                if moved:
                    break
            progress.update(done + 1)
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
    if len(noise) < len(best):
        return False
    gains = np.subtract(best, noise)
    error = gains.std(ddof=1) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    return bool(gains.mean() > max(_GAIN, _CERTAIN * error))
