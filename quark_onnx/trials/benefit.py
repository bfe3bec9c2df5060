"""Estimated effect of a float rewrite on the quantized model's output error.

An optimizer of the float graph preserves the float outputs. Its effect on rounding errors is
open: factors that help one layer may harm another. Both graphs are therefore quantized with a
fast version of the configuration, and compared on held-out samples.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice

from calibrators.onnx_runtime.runner import Receive
from quark_onnx.common.errors import QuarkError
from quark_onnx.config import QConfig
from quark_onnx.graph import Graph, tensor_keys
from quark_onnx.measuring.calibrate import Ranges, calibrate
from quark_onnx.measuring.calibration import Calibration, Keyed
from quark_onnx.optimizers import Samples
from quark_onnx.planning.plan_at_opset import plan_at_opset
from quark_onnx.running.run import Reference, Sample
from quark_onnx.scales.compute_qparams import compute_bias_qparams, compute_qparams
from quark_onnx.scales.keep_sensitive_float import keep_sensitive_ops_float
from quark_onnx.trials.acceptance import min_output_sqnr

logger = logging.getLogger(__name__)

#: Maximum number of samples for ranges, which bounds the runtime.
_MEASURED = 32


def quantized_sqnr(  # noqa: PLR0913
    graph: Graph,
    config: QConfig,
    reference: Reference,
    samples: Samples,
    held_out: Sequence[Sample],
    measured: Calibration,
    receive: Receive | None = None,
) -> float | None:
    """Return the minimum SQNR over the outputs of a quantized graph, in dB.

    None if no SQNR can be measured. Weights are rounded to nearest regardless of the configured
    optimizers, and scales are not searched.

    Args:
        graph: a float graph; not changed.
        config: the settings.
        reference: the original float model.
        samples: calibration samples; the first few are read.
        held_out: samples for the SQNR.
        measured: statistics of the first samples; those of the graph are added.
        receive: called with the outputs of the graph on the first samples.
    """
    # Samples that an optimizer has seen would favour its rewrite.
    if not held_out:
        return None
    try:
        planned = plan_at_opset(
            graph.copy(),
            config,
            reference,
            held_out[0],
            inside=False,
        )
        raised, plan = planned.graph, planned.plan
        ranges: Ranges = {}
        if config.measures:
            few = islice(iter(samples), _MEASURED)
            # the other graph has many of the tensors, too, and the run goes on with one of both
            keyed = Keyed(measured, tensor_keys(raised), rich=False)
            plan, ranges, _ = calibrate(
                raised,
                plan,
                few,
                keyed=keyed,
                receive=receive,
            )
        # The graph is judged with the operators float that the final model would keep float.
        if config.safe:
            plan, _ = keep_sensitive_ops_float(raised, plan, ranges)
        plan, params = compute_qparams(raised, plan, ranges)
        plan = compute_bias_qparams(raised, plan, params)
        return min_output_sqnr(raised, plan, params, reference.remembering, held_out)
    except QuarkError as error:  # the check of the final model reports the error
        logger.debug(
            "what a rewrite of the float graph is worth cannot be told: %s",
            error,
        )
        return None
