"""fuse: operators that compute on codes in place of Q/DQ pairs, each kind verified by running the model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from quark_onnx.errors import QuarkError
from quark_onnx.fusions import FUSIONS
from quark_onnx.graph import Graph
from quark_onnx.steps.run import Sample, run

logger = logging.getLogger(__name__)


def fuse(graph: Graph, samples: Sequence[Sample]) -> tuple[Graph, list[str]]:
    """A copy of a graph with Q/DQ pairs in which operators compute on codes, and what was done, for the report.

    The graph comes back as it is where the copy does not run.
    """
    fused, done = graph.copy(), Counter[str]()
    for node in list(fused.nodes):
        for fusion in FUSIONS.get(node.kind, ()):
            if fusion(fused, node):
                done[fusion.__name__] += 1
                break
    if not done:
        return graph, []
    fused.drop_unused()
    fused.infer()
    for sample in samples[:1]:
        try:
            run(fused.to_model(), sample)
        except QuarkError as error:
            logger.warning("the model with operators on codes does not run (%s); it keeps its Q/DQ pairs", error)
            return graph, [f"operators on codes do not run and were left out: {error}"]
    return fused, [f"{name}: {count}" for name, count in done.items()]
