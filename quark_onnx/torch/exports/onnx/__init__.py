"""Quantized PyTorch models as ONNX models, with the same codes.

torch's exporter sees each quantized layer as one node that names it (``stand_in``, ``trace``);
operators of ONNX then take the place of these nodes (``write``, ``weights``, ``activations``), and
onnxruntime runs the result against torch (``verify``).
"""

from quark_onnx.torch.exports.onnx.decoder import export_decoder
from quark_onnx.torch.exports.onnx.export import Exported, export_onnx

__all__ = ["Exported", "export_decoder", "export_onnx"]
