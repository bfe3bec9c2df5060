"""optimize: the optimizers of the float graph, each verified by running the model."""

from __future__ import annotations

import logging

from quark_onnx.config import QConfig
from quark_onnx.graph import Graph
from quark_onnx.optimizers import FloatOptimizer, Samples
from quark_onnx.steps.prepare import unchanged
from quark_onnx.steps.run import Reference, Sample

logger = logging.getLogger(__name__)


def optimize_float(
    graph: Graph, config: QConfig, reference: Reference, sample: Sample | None, samples: Samples = ()
) -> tuple[Graph, list[str]]:
    """The graph after the optimizers of its stage, in their order, and notes for the report.

    One that changes the outputs on the sample is rolled back; without a sample nothing could be verified.

    Args:
        sample: to verify on.
        samples: calibration data, for optimizers that need it.
    """
    chosen: list[FloatOptimizer] = [optimizer for optimizer in config.optimizers if optimizer.stage == "float"]
    notes = list[str]()
    for optimizer in chosen:
        if sample is None:
            notes.append(
                f"{optimizer.name} was left out: the model runs on no random sample, nothing could be verified"
            )
            continue
        if optimizer.needs_data and not len(samples):
            notes.append(f"{optimizer.name} was left out: it needs calibration data")
            continue
        candidate = graph.copy()
        count = optimizer(candidate, samples)
        candidate.drop_unused()
        candidate.infer()
        if count and unchanged(candidate, sample, reference.repeatable(sample)):
            graph = candidate
            notes.append(f"{optimizer.name}: {count}")
        elif count:
            notes.append(f"{optimizer.name} changed the outputs and was rolled back")
            logger.warning("%s changed the outputs of the model; it was rolled back", optimizer.name)
        else:
            notes.append(f"{optimizer.name}: nothing to do")
        notes += [f"{optimizer.name}: {note}" for note in getattr(count, "notes", ())]
    return graph, notes
