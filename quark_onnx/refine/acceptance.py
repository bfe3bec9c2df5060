"""Accept layer-wise optimization only if it lowers the model's output error on held-out samples.

Each layer computes what it should more closely than with the nearest codes; where errors of layers
had made up for each other, or few samples stand for many, the model as a whole may not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from calibrators.onnx_runtime.session import open_session
from quark_onnx.graph import Graph
from quark_onnx.plan import Entry, Plan, Use
from quark_onnx.report.measure import least_sqnr, measure
from quark_onnx.report.shapes import require_same_shapes
from quark_onnx.steps.compute_qparams import Params
from quark_onnx.steps.function_bodies import define_functions
from quark_onnx.steps.insert import insert
from quark_onnx.steps.run import Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """A graph, its plan and scales as they are before optimizers choose codes."""

    graph: Graph
    entries: dict[Use, Entry]
    params: Params

    @classmethod
    def of(cls, graph: Graph, plan: Plan, params: Params) -> Snapshot:
        """Copies, which share the weights with what they are copies of."""
        kept = replace(params, table=dict(params.table), raised=dict(params.raised))
        return cls(graph.copy(), dict(plan.entries), kept)

    def restore(self, plan: Plan, params: Params) -> Graph:
        """Put plan and scales back as they were; the graph as it was."""
        plan.entries.clear()
        plan.entries.update(self.entries)
        params.table.clear()
        params.table.update(self.params.table)
        params.raised.clear()
        params.raised.update(self.params.raised)
        return self.graph


def min_output_sqnr(
    graph: Graph,
    plan: Plan,
    params: Params,
    floating: Any,
    samples: Sequence[Sample],
) -> float | None:
    """The least signal-to-noise ratio of any output, in dB.

    None where it cannot be told, as without samples.

    Args:
        graph: with scales for all that is planned, biases included.
        floating: a session on the float model.
        samples: what both are run on.

    Raises:
        ModelError: an output has another shape than in the float model.
    """
    if not samples:
        return None
    result = insert(graph, plan, params)
    define_functions(result)
    result.infer()
    lean = result.store is not None
    try:
        errors = measure(
            floating,
            open_session(result.to_model(), lean=lean, optimize=not lean),
            samples,
        )
    except (
        Exception
    ) as error:  # what is wrong with it is said of the model that is handed out
        logger.debug("what optimizers are worth cannot be told: %s", error)
        return None
    require_same_shapes(errors, plan.shapes.sized_by_data)
    return least_sqnr(errors, None)
