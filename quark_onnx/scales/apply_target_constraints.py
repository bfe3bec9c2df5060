"""Constraints of an NPU's integer engine on power-of-two scales.

Scales move before integer codes are computed, so that the codes of weights follow from the
float values and the final scales.
"""

from __future__ import annotations

import numpy as np

from quark_onnx.common.registry import TARGETS
from quark_onnx.config import QConfig
from quark_onnx.dtypes import Integer
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import kinds_of
from quark_onnx.plan import Plan, Quantize, Use
from quark_onnx.scales.compute_qparams import Params
from quark_onnx.targets import Constraints, Positions, chain, constraints_of


class Limits:
    """Constraints of a target on the scales of a plan.

    Attributes:
        uses: the uses whose scales are constrained.
    """

    def __init__(
        self, graph: Graph, plan: Plan, params: Params, config: QConfig
    ) -> None:
        """Collect the constraints; empty for a target without constraints.

        Args:
            graph: the float graph.
            plan: the decisions about its tensors.
            params: the scales; only single, symmetric powers of two of integer formats are
                constrained.
            config: the settings, with the target.
        """
        is_limited = config.target and TARGETS[config.target].integer_engine
        nodes = graph.nodes if is_limited else []
        wiring = _Planned(graph, plan, params)
        self._constraints: Constraints = constraints_of(graph, nodes, wiring)
        # Groups of uses that constraints force to equal positions.
        self._tied = self._constraints.tied()
        self.uses = [key for key in self._constraints.keys if isinstance(key, Use)]

    def tied(self, use: Use) -> list[Use]:
        """Return the uses that share a scale with ``use``, including ``use``."""
        return [key for key in self._tied.get(use, (use,)) if isinstance(key, Use)]

    def settled(self, scales: dict[Use, float]) -> dict[Use, float]:
        """Return the scales to move, close to ``scales``, to meet every constraint.

        Args:
            scales: a power of two for each constrained use.

        Returns:
            The new scales of the uses that have to move; empty if every constraint holds.

        Raises:
            ConstraintError: the constraints have no solution.
        """
        at: Positions = {use: position_of(scales[use]) for use in self.uses}
        moved = self._constraints.settle(at)
        # A change of a position by one doubles or halves the scale.
        return {use: 2.0 ** -moved[use] for use in self.uses if moved[use] != at[use]}


def apply_target_constraints(limits: Limits, params: Params) -> int:
    """Move the scales in ``params`` until every constraint holds.

    Returns:
        The number of moved scales.

    Raises:
        ConstraintError: the constraints have no solution.
    """
    moved = limits.settled({use: float(params.table[use].scale) for use in limits.uses})
    for use, scale in moved.items():
        params.table[use] = params.table[use].with_scale(
            np.full_like(params.table[use].scale, scale),
        )
    return len(moved)


def position_of(scale: float) -> int:
    """Return the binary point position p of a scale 2**-p."""
    # log2 of a power of two is exact; rounding guards against scales that are none.
    return -round(float(np.log2(scale)))


class _Planned:
    """Binary point positions according to a plan."""

    def __init__(self, graph: Graph, plan: Plan, params: Params) -> None:
        self._graph, self._plan, self._params = graph, plan, params

    def read(self, node: Node, index: int) -> Use | None:
        return self._key(self._plan.use(node.input(index), node))

    def result(self, node: Node) -> Use | None:
        return self._key(Use(self._behind(node)[-1].outputs[0]))

    def leaks(self, node: Node) -> bool:
        # The first of the chain is the node itself.
        return "LeakyRelu" in kinds_of(self._behind(node)[1:])

    def _key(self, use: Use) -> Use | None:
        """Return the root of a use whose scale is a binary point position; None for others."""
        root = self._plan.root(use)
        entry, params = self._plan.entries.get(root), self._params.table.get(root)
        # The engine has one position for a whole tensor.
        if not isinstance(entry, Quantize) or params is None or params.scale.size != 1:
            return None
        spec = entry.spec
        if spec.pow2 and spec.symmetric and isinstance(spec.dtype, Integer):
            return root
        return None

    def _behind(self, node: Node) -> list[Node]:
        return chain(
            self._graph,
            node,
            lambda member: self._key(Use(member.outputs[0])) is not None,
        )
