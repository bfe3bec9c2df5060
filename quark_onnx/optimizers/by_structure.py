"""Optimizers that run without being named, where the structure of a model calls for them."""

from __future__ import annotations

from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig, QuantizationSpec
from quark_onnx.dtypes import Integer
from quark_onnx.graph import Graph
from quark_onnx.optimizers.cle import CLE
from quark_onnx.patterns.depthwise import unbounded_depthwise

#: Most bits of a tensor with one scale that equalization helps: with 16, small channels have codes
#: enough.
_FEW_BITS = 8
#: Least gain in dB. A smaller one may be chance, and nobody asked for the rewrite.
_LEAST_GAIN = 2.0
#: Least fall of a modelled noise-to-signal ratio for an operator. At A8W8 one of YOLOX-nano's 27
#: gates brings 5.1, and the others 0.04 or less; with it alone the output SQNR is 10.5 dB, as with
#: all, which take 13 % of the runtime.
_LEAST_NOISE = 0.05


def with_equalization(config: QConfig, graph: Graph) -> tuple[QConfig, str]:
    """Return a configuration with ``cle`` if ``config.equalize`` and the graph call for it.

    One scale for all channels of an activation or a weight leaves few codes to the small channels.
    A depthwise convolution computes each result from one channel, and passes the error on
    undiminished: YOLOX-nano has 26.5 mAP at A8W8 without equalization, 32.0 with it, and 33.7 in
    float; at A16W8 with one scale per weight 0.04 and 32.1.

    Args:
        config: the settings; returned as they are if they name a rewrite of the float graph.
        graph: the float graph.

    Returns:
        The configuration, and the reason as a note for the report; empty without a change.
    """
    activation = config.activation
    if not config.equalize or activation is None or not activation.measured:
        return config, ""
    if not isinstance(activation.dtype, Integer):
        return config, ""
    # Weights with a scale per channel or block have codes enough for small channels, too.
    weight = config.weight
    fine = weight is not None and (weight.per_channel or bool(weight.block_size))
    coarse = [activation] if fine else [activation, weight]
    if not any(_has_few_codes(spec) for spec in coarse):
        return config, ""
    # The user has chosen rewrites already, perhaps instead of this one.
    if any(optimizer.stage == "float" for optimizer in config.optimizers):
        return config, ""
    convolutions = unbounded_depthwise(graph)
    if not convolutions:
        return config, ""
    count = counted(len(convolutions), "depthwise convolution")
    reason = (
        f"cle: considered for {count} of activations without an upper bound;"
        " equalize=False leaves it out"
    )
    # With a scale per channel, other layers gain too little for the operators that gates take. With
    # one scale they need them: YOLOX-nano at XINT8 has 29.9 mAP with 9 gates, 33.0 with all 94.
    cle = CLE(
        passing="depthwise" if fine else "all",
        least_gain=_LEAST_GAIN,
        least_noise=_LEAST_NOISE if fine else 0.0,
    )
    return config.with_(optimizers=(cle, *config.optimizers)), reason


def _has_few_codes(spec: QuantizationSpec | None) -> bool:
    """Return whether values are integers of so few bits that small channels get few codes."""
    if spec is None or not isinstance(spec.dtype, Integer):
        return False
    return spec.dtype.bits <= _FEW_BITS
