"""Calibration with AMD Quark's names: readers of data, and calibrators."""

from quark_onnx.common.absent import save_tensor_hist_fig
from quark_onnx.onnx.calibration.calib_utils import (
    nearest_non_passthrough_ancestor_mapping,
    update_tensors_range_with_dependencies,
)
from quark_onnx.onnx.calibration.calibrators import (
    calibrate_model,
    create_calibrator_float_scale,
    create_calibrator_power_of_two,
    fake_calibration,
    run_calibration,
)
from quark_onnx.onnx.calibration.data_readers import (
    CachedDataReader,
    PathDataReader,
    RandomDataReader,
    get_data_reader,
)
from quark_onnx.onnx.quant_utils import (
    ExtendedCalibrationMethod,
    Int16Method,
    LayerWiseMethod,
    PowerOfTwoMethod,
)

__all__ = [
    "CachedDataReader",
    "ExtendedCalibrationMethod",
    "Int16Method",
    "LayerWiseMethod",
    "PathDataReader",
    "PowerOfTwoMethod",
    "RandomDataReader",
    "calibrate_model",
    "create_calibrator_float_scale",
    "create_calibrator_power_of_two",
    "fake_calibration",
    "get_data_reader",
    "nearest_non_passthrough_ancestor_mapping",
    "run_calibration",
    "save_tensor_hist_fig",
    "update_tensors_range_with_dependencies",
]
