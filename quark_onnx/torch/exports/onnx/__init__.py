"""Export of quantized PyTorch models to ONNX, with the same codes.

torch's exporter sees each quantized layer as one placeholder node with the layer's name
(``stand_in``, ``trace``). ONNX operators then replace the placeholders (``write``, ``weights``,
``activations``), and the outputs of onnxruntime are compared with torch (``verify``).
"""

from quark_onnx.torch.exports.onnx.decoder import export_decoder
from quark_onnx.torch.exports.onnx.export import Exported, write_onnx

__all__ = ["Exported", "export_decoder", "write_onnx"]
