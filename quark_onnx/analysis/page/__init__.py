"""HTML page of an analysis, in a single file with its plots."""

from quark_onnx.analysis.page.candidates import render_search, write_search_page
from quark_onnx.analysis.page.page import render, write_page

__all__ = ["render", "render_search", "write_page", "write_search_page"]
