"""Configurations that tests name, which spell out what a preset may change its mind about; and the
depth of the sweeps.
"""

import os

from calibrators.onnx_runtime.cpu_features import saturates
from quark_onnx import QConfig

#: Whether sweeps take every model and every graph (``scripts/test --nightly``), or a part of them.
NIGHTLY = bool(os.environ.get("QUARK_ONNX_NIGHTLY"))

#: uint8 asymmetric activations and int8 symmetric weights, with one scale a tensor or a channel.
TENSOR = QConfig.of("A8W8").with_(calibrator="minmax", per_channel=False)
CHANNEL = TENSOR.with_(per_channel=True)
#: int8 symmetric throughout.
SIGNED = QConfig.of("S8S8").with_(calibrator="minmax", per_channel=False)
#: uint16 activations.
WIDE = QConfig.of("A16W8").with_(calibrator="minmax", per_channel=True)
#: Power-of-two scales, which are not searched.
POW2 = QConfig.of("XINT8").with_(calibrator="minmse", per_channel=False, search=0)

ALL = {
    "tensor": TENSOR,
    "channel": CHANNEL,
    "signed": SIGNED,
    "wide": WIDE,
    "pow2": POW2,
}

#: Presets that one network is quantized with: onnxruntime takes a second to open the functions of a
#: block format in each network, and MX6, MXFP8E4M3 and MXFP4E2M1 have the same functions but for
#: the element.
ONE_NETWORK = frozenset(
    ("MX4", "MX9", "MX9_INT8", "MXFP8E5M2", "MXFP6E3M2", "MXFP6E2M3", "MXINT8")
)


def portable(config: QConfig) -> QConfig:
    """A configuration whose integer kernels are right on every processor: where sums of 8-bit
    products saturate, int8 weights have one bit less, as users are told to choose there.
    """
    if config.weight is None or config.weight.dtype.name != "int8" or not saturates():
        return config
    return config.with_(weight=config.weight.with_(reduce_range=True))
