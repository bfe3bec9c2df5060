"""Models as GGUF files, which llama.cpp and what is built on it load."""

from quark_onnx.torch.gguf.export import GgufFile, write_gguf

__all__ = ["GgufFile", "write_gguf"]
