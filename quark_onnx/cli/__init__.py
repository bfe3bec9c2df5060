"""The command line: ``quark-onnx quantize | explain | compare | list``, one file a command."""

from quark_onnx.cli.dispatch import main

__all__ = ["main"]
