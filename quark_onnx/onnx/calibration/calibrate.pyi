from quark_onnx.onnx.calibration.calibrators import calibrate_model as calibrate_model
