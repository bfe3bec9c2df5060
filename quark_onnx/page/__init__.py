"""Self-contained HTML pages with drawings, light and dark, wide and narrow."""

from quark_onnx.page.document import (
    document,
    facts,
    grouped,
    scrolling,
    table_row,
    write_whole,
)
from quark_onnx.page.verdict import Action, verdict

__all__ = [
    "Action",
    "document",
    "facts",
    "grouped",
    "scrolling",
    "table_row",
    "verdict",
    "write_whole",
]
