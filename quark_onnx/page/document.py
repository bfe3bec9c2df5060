"""The frame of a page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from calibrators.shown import printable
from quark_onnx.page.style import CSS

#: Characters that HTML forbids even when escaped, and those that are invisible or turn the text
#: after them around.
_FORBIDDEN = re.compile(
    "[\ud800-\udfff\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)


def document(title: str, parts: Iterable[str]) -> str:
    """Return the text of a page.

    Args:
        title: title of the page.
        parts: the HTML parts.
    """
    # One style sheet in the page: a page is one file that can be mailed and opened offline.
    text = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )
    # Names of tensors come from models, and may hold any character.
    return _FORBIDDEN.sub(lambda match: printable(match[0]), text)
