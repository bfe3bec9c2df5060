from quark_onnx.common.absent import check_and_create_path as check_and_create_path
from quark_onnx.common.absent import create_tmp_dir as create_tmp_dir
from quark_onnx.common.absent import get_memory_usage as get_memory_usage
from quark_onnx.common.absent import update_tmp_dir as update_tmp_dir
