"""The report of a run as a page to look at: one HTML file with its plots in it."""

from quark_onnx.torch.page.page import render, write_page

__all__ = ["render", "write_page"]
