"""Reported: the common base of results: lines for a terminal, a page, a document for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibrators.shown import printable
from quark_onnx.common.reported import to_json
from quark_onnx.page.blocks import Block
from quark_onnx.page.browser import render_page, write_page
from quark_onnx.page.terminal import render_lines


class Reported:
    """A result that prints as lines, converts to JSON, and is a page in a browser or notebook."""

    def lines(self) -> list[str]:
        """Return the result as lines of text; a verdict, if there is one, comes last."""
        return render_lines(self.blocks())

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values; numbers may be infinite."""
        raise NotImplementedError

    def blocks(self) -> Sequence[Block]:
        """Return the result as blocks, without the heading of a page."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return the result as a JSON document."""
        return to_json(self.to_dict())

    def write_page(self, path: str | Path, title: str, names: str = "") -> None:
        """Write the result as a page, a single file without external resources.

        Args:
            path: path of the HTML file; the file is written atomically.
            title: title of the page.
            names: names of the models.

        Raises:
            OSError: the folder cannot be written to.
        """
        write_page(Path(path), title, names, self.blocks())

    def _repr_html_(self) -> str:
        """Return the result as a notebook shows it: a page in a frame of its own."""
        page = render_page("result", self.blocks())
        # A frame keeps the style sheet of the page from the notebook.
        content = page.replace("&", "&amp;").replace('"', "&quot;")
        style = "width: 100%; height: 640px; border: 0"
        return f'<iframe srcdoc="{content}" style="{style}"></iframe>'

    def __repr__(self) -> str:
        """Return a line with the verdict, where the fields would be pages."""
        lines = self.lines() or [""]
        verdicts = [line for line in lines if line.startswith("verdict")]
        # Names from models may hold control characters.
        line = printable([*verdicts, lines[0]][0])
        return f"{type(self).__name__}: {' '.join(line.split())}; print() has all lines"

    def __str__(self) -> str:
        # Names from models may hold control characters.
        return "\n".join(map(printable, self.lines()))
