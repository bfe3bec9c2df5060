from quark_onnx.onnx.auto_search import AutoSearch as AutoSearch
from quark_onnx.onnx.auto_search import AutoSearchConfig as AutoSearchConfig
from quark_onnx.onnx.auto_search import AutoSearchPro as AutoSearchPro
from quark_onnx.onnx.auto_search import SearchSpace as SearchSpace
from quark_onnx.onnx.auto_search import generate_all_configs as generate_all_configs
from quark_onnx.onnx.auto_search import get_auto_search_config as get_auto_search_config
