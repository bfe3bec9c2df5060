"""Estimate whether a rewrite of the float graph lowers the quantized model's output error.

An optimizer of the float graph keeps what the model computes, which says nothing of what rounding
makes of it: factors that serve one layer may cost another more. So both graphs are quantized as the
configuration says, as far as that is quick, and judged on samples that nothing was chosen by.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice

from quark_onnx.config import QConfig
from quark_onnx.errors import QuarkError
from quark_onnx.graph import Graph
from quark_onnx.optimizers import Samples
from quark_onnx.refine.acceptance import min_output_sqnr
from quark_onnx.steps.calibrate import calibrate
from quark_onnx.steps.compute_qparams import compute_bias_qparams, compute_qparams
from quark_onnx.steps.keep_sensitive_float import keep_sensitive_ops_float
from quark_onnx.steps.make_plan import make_plan
from quark_onnx.steps.opsets import raise_opset_for
from quark_onnx.steps.run import Reference, Sample

logger = logging.getLogger(__name__)

#: Ranges are measured on so many samples at most, which bounds what it takes.
_MEASURED = 32


def quantized_sqnr(
    graph: Graph,
    config: QConfig,
    reference: Reference,
    samples: Samples,
    held_out: Sequence[Sample],
) -> float | None:
    """Return the least signal-to-noise ratio of any output of a quantized graph, in dB.

    None where it cannot be told.

    Weights are rounded to the nearest, whatever optimizers the configuration names; scales are not
    searched.

    Args:
        graph: a float graph; it stays as it is.
        reference: the float model that it came from.
        samples: calibration data; the first few are read.
        held_out: what it is judged by.
    """
    if not held_out:
        return None
    try:
        plain = make_plan(graph, config, strict=False)
        raised, _ = raise_opset_for(graph.copy(), plain, config, reference, held_out[0])
        plan = make_plan(raised, config, strict=False)
        ranges = (
            calibrate(raised, plan, islice(iter(samples), _MEASURED))
            if config.measures
            else {}
        )
        if config.safe:
            keep_sensitive_ops_float(raised, plan, ranges)
        params = compute_qparams(raised, plan, ranges)
        compute_bias_qparams(raised, plan, params)
        return min_output_sqnr(raised, plan, params, reference.session, held_out)
    except QuarkError as error:  # what is wrong is said of the model that is handed out
        logger.debug(
            "what a rewrite of the float graph is worth cannot be told: %s",
            error,
        )
        return None
