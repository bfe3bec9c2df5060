"""Command line ``quark-onnx``; every command has a file."""

from quark_onnx.cli.dispatch import main

__all__ = ["main"]
