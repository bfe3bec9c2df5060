"""Pages to look at: self-contained HTML with drawings in it, light and dark, wide and narrow."""

from quark_onnx.page.document import document, facts, write_whole

__all__ = ["document", "facts", "write_whole"]
