from quark_onnx.onnx.quant_utils import ExtendedQuantFormat as ExtendedQuantFormat
from quark_onnx.onnx.quant_utils import ExtendedQuantType as ExtendedQuantType
from quark_onnx.onnx.quant_utils import VitisQuantFormat as VitisQuantFormat
from quark_onnx.onnx.quant_utils import VitisQuantType as VitisQuantType
