from quark_onnx.onnx.calibration.calibrators import fake_calibration as fake_calibration
from quark_onnx.onnx.calibration.calibrators import run_calibration as run_calibration
