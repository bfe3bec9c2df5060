from quark_onnx.onnx.legacy import QuantizationConfig as QuantizationConfig
