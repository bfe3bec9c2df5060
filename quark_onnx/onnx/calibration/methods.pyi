from quark_onnx.onnx.quant_utils import ExtendedCalibrationMethod as ExtendedCalibrationMethod
from quark_onnx.onnx.quant_utils import Int16Method as Int16Method
from quark_onnx.onnx.quant_utils import LayerWiseMethod as LayerWiseMethod
from quark_onnx.onnx.quant_utils import PowerOfTwoMethod as PowerOfTwoMethod
