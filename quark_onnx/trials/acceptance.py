"""Acceptance of layer-wise optimization, by the output error on held-out samples.

Optimized codes lower the error of each layer compared with round to nearest. The error of the
model may still grow: errors of layers may have compensated each other, and a few samples may
represent the data badly.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from calibrators.onnx_runtime.worker import Session
from quark_onnx.graph import Graph
from quark_onnx.plan import Plan
from quark_onnx.report.measure import measure
from quark_onnx.report.parts import JoinedParts
from quark_onnx.report.shapes import require_same_shapes
from quark_onnx.running.run import Sample
from quark_onnx.scales.compute_qparams import Params
from quark_onnx.trials.quantized_session import open_to_measure

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """A graph, its plan and its scales before optimizers choose codes."""

    graph: Graph
    plan: Plan
    params: Params

    @classmethod
    def of(cls, graph: Graph, plan: Plan, params: Params) -> Snapshot:
        """Return copies, which share their weights with the originals."""
        # Later steps write to the dictionaries; the values in them are never changed.
        kept = params.with_scales({})
        return cls(graph.copy(), plan, kept)

    def restore(self, params: Params) -> tuple[Graph, Plan]:
        """Restore the scales in place, and return the original graph and plan.

        Args:
            params: the scales to overwrite; codes that were computed with them are not removed.
        """
        params.table.clear()
        params.table.update(self.params.table)
        params.raised.clear()
        params.raised.update(self.params.raised)
        return self.graph, self.plan


def min_output_sqnr(
    graph: Graph,
    plan: Plan,
    params: Params,
    floating: Session,
    samples: Sequence[Sample],
) -> float | None:
    """Return the minimum SQNR over the outputs, in dB.

    An output that joins boxes and scores of a detector has the mean SQNR of these parts. None if
    no SQNR can be measured, for example without samples.

    Args:
        graph: the graph.
        plan: the plan of the graph.
        params: scales of every planned tensor, biases included.
        floating: a session on the float model.
        samples: samples to run both models on.

    Raises:
        ModelError: an output has another shape than in the float model.
    """
    if not samples:
        return None
    parts = JoinedParts()
    try:
        session = open_to_measure(graph, plan, params)
        errors = measure(floating, session, samples, parts.add)
    except Exception as error:  # the check of the final model reports the error
        logger.debug("what optimizers are worth cannot be told: %s", error)
        return None
    # Outputs whose size depends on values, such as lists of detections, may differ.
    require_same_shapes(errors, plan.shapes.sized_by_data)
    return parts.least_sqnr(errors)
