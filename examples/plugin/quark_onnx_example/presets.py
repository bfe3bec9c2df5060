"""A6W6: activations and weights of 6 bits."""

from quark_onnx import QConfig, QuantizationSpec
from quark_onnx.common.registry import PRESETS
from quark_onnx_example.formats import INT6

PRESETS.add(
    "A6W6",
    QConfig(
        QuantizationSpec(INT6, symmetric=False, calibrator="percentile"),
        QuantizationSpec(INT6, per_channel=True),
    ),
)
