from quark_onnx.onnx.auto_search import AutoSearch as AutoSearch
from quark_onnx.onnx.auto_search import AutoSearchConfig as AutoSearchConfig
from quark_onnx.onnx.auto_search import SearchSpace as SearchSpace
