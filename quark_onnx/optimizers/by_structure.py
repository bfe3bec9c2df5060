"""Optimizers that run without being named, where the structure of a model calls for them."""

from __future__ import annotations

from dataclasses import replace

from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig, QuantizationSpec
from quark_onnx.dtypes import Integer
from quark_onnx.graph import Graph
from quark_onnx.optimizers.bias_correction import BiasCorrection
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
#: The same for detectors, whose boxes and scores need more than a class does: the noise at 20 dB.
#: Ten of YOLOX-nano's 94 gates take 3 % of the runtime, and all take 16 % (measured).
_LEAST_NOISE_OF_DETECTORS = 0.01
#: Least gain of corrected biases in dB, which take no runtime.
_LEAST_GAIN_OF_BIASES = 0.1


def with_equalization(
    config: QConfig, graph: Graph, kind: str = ""
) -> tuple[QConfig, str]:
    """Return a configuration with ``cle`` if ``config.equalize`` and the graph call for it.

    A shift of the mean of a score or of a coordinate is an error on every anchor of a detector,
    which therefore gets ``bias_correction``, too, as its recipe has it.

    One scale for all channels of an activation or a weight leaves few codes to the small channels.
    A depthwise convolution computes each result from one channel, and passes the error on
    undiminished: YOLOX-nano has 26.5 mAP at A8W8 without equalization, 32.0 with it, and 33.7 in
    float; at A16W8 with one scale per weight 0.04 and 32.1.

    Args:
        config: the settings; returned as they are if they name a rewrite of the float graph.
        graph: the float graph.
        kind: kind of the model, from ``recipes.KINDS``; empty if unknown.

    Returns:
        The configuration, and the reason as a note for the report; empty without a change.
    """
    if not _is_open_to_cle(config):
        return config, ""
    fine = _has_fine_weights(config)
    convolutions = unbounded_depthwise(graph)
    if convolutions:
        count = counted(len(convolutions), "depthwise convolution")
        cause = f"{count} of activations without an upper bound"
    # Boxes and scores need more than a class does, and other layers gain enough for them.
    elif kind == "detector" and not fine:
        cause = "a detector whose weights have one scale"
    else:
        return config, ""
    consequence = f"considered for {cause}; equalize=False leaves it out"
    # With a scale per channel, other layers gain too little for the operators that gates take. With
    # one scale they need them: YOLOX-nano at XINT8 has 29.9 mAP with 9 gates, 33.0 with all 94.
    cle = CLE(
        passing="depthwise" if fine else "all",
        least_gain=_LEAST_GAIN,
        least_noise=_LEAST_NOISE if fine else 0.0,
    )
    # The search of scales and the optimizers of layers that are named correct biases themselves.
    has_biases = bool(config.search) or any(
        optimizer.stage == "layer" for optimizer in config.optimizers
    )
    if kind != "detector" or config.npu or has_biases:
        optimizers = (cle, *config.optimizers)
        return config.with_(optimizers=optimizers), f"cle: {consequence}"
    if fine:
        cle = replace(cle, passing="all", least_noise=_LEAST_NOISE_OF_DETECTORS)
    biases = BiasCorrection(least_gain=_LEAST_GAIN_OF_BIASES)
    optimizers = (cle, *config.optimizers, biases)
    reason = f"cle, bias_correction: a detector; {consequence}"
    return config.with_(optimizers=optimizers), reason


def _is_open_to_cle(config: QConfig) -> bool:
    """Return whether the settings have tensors that equalization helps, and leave it open."""
    activation = config.activation
    if not config.equalize or activation is None or not activation.measured:
        return False
    if not isinstance(activation.dtype, Integer):
        return False
    # The user has chosen rewrites already, perhaps instead of this one.
    if any(optimizer.stage == "float" for optimizer in config.optimizers):
        return False
    fine = _has_fine_weights(config)
    coarse = [activation] if fine else [activation, config.weight]
    return any(_has_few_codes(spec) for spec in coarse)


def _has_fine_weights(config: QConfig) -> bool:
    """Return whether weights have scales per channel or block, with codes for small channels."""
    weight = config.weight
    return weight is not None and (weight.per_channel or bool(weight.block_size))


def _has_few_codes(spec: QuantizationSpec | None) -> bool:
    """Return whether values are integers of so few bits that small channels get few codes."""
    if spec is None or not isinstance(spec.dtype, Integer):
        return False
    return spec.dtype.bits <= _FEW_BITS
