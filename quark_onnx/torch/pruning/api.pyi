from quark_onnx.common.absent import ModelPruner as ModelPruner
