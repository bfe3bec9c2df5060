from quark_onnx.onnx.auto_search import AutoSearchPro as AutoSearchPro
