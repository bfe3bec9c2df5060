from quark_onnx.onnx.deploy_utils import dump_model as dump_model
