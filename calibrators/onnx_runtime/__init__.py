"""Open and run sessions of onnxruntime over calibration data."""
