"""Turn streams of calibration data into quantization ranges, scales and zero points.

The arithmetic needs numpy alone. ``calibrators.onnx_runtime.runner`` runs an ONNX model over data
with onnxruntime, and ``calibrators.readers.open`` opens the data; both are imported only where they
are used.

>>> import numpy as np
>>> method = create("minmax")
>>> statistic = method.statistic()
>>> for batch in (np.array([0.0, 1.0]), np.array([-1.0, 3.0])):
...     statistic.observe(rows(batch))
>>> grid = Grid(0, 255, symmetric=False)
>>> params = params_for(method.range(statistic, grid), grid)
>>> float(params.scale), int(params.zero_point)
(0.01568627543747425, 64)
"""

import os

from calibrators.affine import covered, dequantize, fake_quantize, params_for, quantize
from calibrators.base import CALIBRATORS, Calibrator, Statistic, create, register
from calibrators.best import Best
from calibrators.entropy import Entropy
from calibrators.errors import CalibrationError, DataError
from calibrators.extremes import Extremes, MeanExtremes, MovingExtremes
from calibrators.grid import Grid, QParams, Range
from calibrators.grouped import GroupedHistogram
from calibrators.histogram import Histogram
from calibrators.layerwise import LayerwisePercentile
from calibrators.layout import rows
from calibrators.mean_minmax import MeanMinMax
from calibrators.minmax import MinMax
from calibrators.minmse import MinMSE
from calibrators.nonoverflow import NonOverflow
from calibrators.percentile import Percentile

__all__ = [
    "CALIBRATORS",
    "Best",
    "CalibrationError",
    "Calibrator",
    "DataError",
    "Entropy",
    "Extremes",
    "Grid",
    "GroupedHistogram",
    "Histogram",
    "LayerwisePercentile",
    "MeanExtremes",
    "MeanMinMax",
    "MinMSE",
    "MinMax",
    "MovingExtremes",
    "NonOverflow",
    "Percentile",
    "QParams",
    "Range",
    "Statistic",
    "covered",
    "create",
    "dequantize",
    "fake_quantize",
    "params_for",
    "quantize",
    "register",
    "rows",
]

# onnxruntime 1.32 writes a file .ses with a time and a UUID into the temporary folder as soon as it
# is imported, unless this is set by then. Only functions below this package import it; what the
# user has set stays.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
