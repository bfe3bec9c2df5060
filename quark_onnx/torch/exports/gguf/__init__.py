"""Export of models to GGUF files for llama.cpp."""

from quark_onnx.torch.exports.gguf.export import GgufFile, write_gguf
from quark_onnx.torch.exports.gguf.quantized_model import (
    check_gguf,
    write_quantized_gguf,
)

__all__ = ["GgufFile", "check_gguf", "write_gguf", "write_quantized_gguf"]
