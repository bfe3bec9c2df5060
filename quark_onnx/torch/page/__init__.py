"""Report of a run as an HTML page with plots."""

from quark_onnx.torch.page.page import render, write_page

__all__ = ["render", "write_page"]
