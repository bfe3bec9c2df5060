"""Sessions of onnxruntime, and the runner that feeds them."""
