from quark_onnx.common.absent import TPDeviceManager as TPDeviceManager
from quark_onnx.common.absent import e4m3fn_to_e4m3fnuz as e4m3fn_to_e4m3fnuz
from quark_onnx.common.absent import get_gpu_arch as get_gpu_arch
from quark_onnx.common.absent import is_gfx950 as is_gfx950
