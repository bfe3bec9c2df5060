"""QuaRot: rotate activations to spread outliers, and weights inversely.

Ashkboos et al. 2024, "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs". A rotation spreads an
outlier over all channels, and its inverse in the next weight reverts it. If all writers and readers
of a tensor are linear, both are folded into weights: the residual stream of pre-norm models, and
the values of attention heads. Elsewhere the model has to rotate at runtime.

Root mean squares are invariant under a rotation. Means are not, so that for layer normalizations
that subtract a mean, the rotation keeps the vector of ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from quark_onnx.common.errors import ConfigError
from quark_onnx.graph import Graph, Node
from quark_onnx.kernels.hadamard import Rotation, balanced, random_hadamard
from quark_onnx.kernels.noise import EIGHT_BITS, Rounding
from quark_onnx.optimizers.base import Rewrites, Samples, register
from quark_onnx.patterns.attention_values import heads
from quark_onnx.patterns.linear import readers_of, sources
from quark_onnx.patterns.norms import norms
from quark_onnx.patterns.residual_stream import streams

#: With more channels, a rotation that is a Kronecker product runs as two small products.
_SMALL = 64
_FLOAT = (
    "it rotates its input, so that no channel is much larger than the others when it is"
    " rounded"
)


@register
@dataclass(frozen=True)
class QuaRot:
    """Rotates residual streams and attention heads, to spread outliers over channels.

    Attributes:
        online: rotate the remaining inputs of MatMul and Gemm at runtime, too.
        seed: seed of the random signs.
    """

    name: ClassVar[str] = "quarot"
    stage: ClassVar[str] = "float"
    judged: ClassVar[bool] = True
    needs_data: ClassVar[bool] = False
    reads_data: ClassVar[bool] = False
    exact: ClassVar[bool] = True

    online: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.online, bool):
            raise ConfigError(
                f"online of quarot is {self.online!r}; it must be true or false",
            )
        # ``type`` instead of isinstance: True is an int, too.
        if type(self.seed) is not int or self.seed < 0:
            raise ConfigError(
                f"seed of quarot is {self.seed!r}; it must be a whole number, 0 or"
                " more",
            )

    def __call__(
        self,
        graph: Graph,
        samples: Samples = (),
        rounding: Rounding = EIGHT_BITS,
    ) -> Rewrites:
        """Rotate in place; return the number of streams, attentions and layer inputs."""
        rotated_streams, notes = streams(graph, norms(graph))
        attentions = heads(graph)
        done = set[Node]()
        for index, stream in enumerate(rotated_streams):
            # LayerNorm subtracts the mean over channels, so that the rotation must keep the vector
            # of ones; RMSNorm commutes with any rotation.
            # One seed gives different signs for other sizes.
            rotation_of = balanced if stream.centered else random_hadamard
            rotation = rotation_of(stream.size, self.seed)
            stream.rotate(graph, rotation, f"rotated{index or ''}")
            # The readers' inputs are rotated, which an online rotation must not undo.
            done |= stream.readers.keys()
        for attention in attentions:
            # An output projection that a stream has rotated already reads rotated values.
            if attention.reader.node not in done:
                rotation = random_hadamard(attention.size, self.seed)
                attention.rotate(graph, rotation, f"heads{attention.size}")
                done.add(attention.reader.node)
        count = 0
        if self.online:
            count = sum(self._run(graph, tensor, done) for tensor in sources(graph))
        return Rewrites(len(rotated_streams) + len(attentions) + count, notes)

    def _run(self, graph: Graph, tensor: str, done: set[Node]) -> bool:
        """Rotate a tensor at runtime for the layers that read it; return whether a layer does.

        Args:
            done: layers whose input is rotated already, which stay as they are.
        """
        layers = [
            layer for layer in readers_of(graph, tensor)[0] if layer.node not in done
        ]
        # A single channel has no other one to spread over.
        if not layers or layers[0].inputs < 2:
            return False
        size = layers[0].inputs
        rotation = _halves(size, self.seed)
        rotated = _insert(graph, tensor, rotation)
        for layer in layers:
            side = layer.weight[0]
            # x R times R^T W is x W: the weight is rotated along its inputs.
            side.change(graph, "online", partial(rotation.turn, axis=side.axis))
            graph.set_input(layer.node, 0, rotated)
        return True


def _halves(size: int, seed: int) -> Rotation:
    """Return a rotation of one or two factors of similar sizes, with independent random signs."""
    orders = [len(factor) for factor in random_hadamard(size, seed).factors]
    # Sizes of the left factor wherever the product can be split.
    cuts = [int(np.prod(orders[:count])) for count in range(1, len(orders))]
    if size <= _SMALL or not cuts:
        return Rotation((random_hadamard(size, seed).matrix(),))
    # Two factors of n = a b cost a + b products per value in place of n; equal sides are cheapest.
    left = min(cuts, key=lambda cut: cut + size // cut)
    return Rotation(
        tuple(random_hadamard(order, seed).matrix() for order in (left, size // left)),
    )


def _insert(graph: Graph, tensor: str, rotation: Rotation) -> str:
    """Insert nodes that rotate the last axis of a tensor; return the name of the result.

    Two factors are two products around a Reshape to (..., left, right), and one factor is a single
    product.
    """
    rank = len(graph.sizes(tensor))
    result = graph.fresh(f"{tensor}_rotated")
    # A vector, or a tensor of unknown rank, has no axes to reshape by.
    if rank < 2 or len(rotation.factors) == 1:
        [matrix] = _constants(graph, "rotation", rotation.matrix())
        graph.add("MatMul", [tensor, matrix], [result]).stay_float(_FLOAT)
        return result
    left, right = rotation.factors
    # 0 keeps the size of an axis (ONNX Reshape), also where it is symbolic.
    kept = [0] * (rank - 1)
    split = _constants(graph, "split", np.array([*kept, len(left), len(right)]))
    joined = _constants(graph, "joined", np.array([*kept, rotation.size]))
    left_factor = _constants(graph, "left", left.T)
    right_factor = _constants(graph, "rotation", right)
    steps = (
        ("Reshape", [tensor, *split]),
        # "" stands for the result of the step before.
        ("MatMul", ["", *right_factor]),
        ("MatMul", [*left_factor, ""]),
        ("Reshape", ["", *joined]),
    )
    name = tensor
    for index, (kind, inputs) in enumerate(steps, start=1):
        is_last = index == len(steps)
        output = result if is_last else graph.fresh(f"{tensor}_rotating")
        operands = [operand or name for operand in inputs]
        graph.add(kind, operands, [output]).stay_float(_FLOAT)
        name = output
    return result


def _constants(graph: Graph, kind: str, value: NDArray[Any]) -> list[str]:
    """Return a shape, or a matrix known by its size, as a shared constant."""
    is_shape = value.dtype.kind == "i"
    stored = value.astype(np.int64 if is_shape else np.float32)
    # All rotations of a run have one seed.
    key = ("quarot", kind, str(value.tolist() if is_shape else len(value)))
    return graph.once(key, lambda: [graph.add_constant(f"quarot_{kind}", stored)])
