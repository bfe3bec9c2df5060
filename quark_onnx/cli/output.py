"""Answers of commands, and their output as text and JSON on any console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from calibrators.shown import printable
from quark_onnx.common.errors import QuarkError
from quark_onnx.page.blocks import Block
from quark_onnx.page.terminal import Table
from quark_onnx.report.verdict import NextStep


@dataclass(frozen=True)
class Answer:
    """Answer of a command.

    Attributes:
        body: answer for a person: blocks, and finished texts and tables, from top to bottom.
        document: answer for a program: values of JSON, and infinities.
        failure: the gate that was missed, if the answer is still worth showing.
    """

    body: Sequence[str | Table | Block]
    document: dict[str, Any]
    failure: QuarkError | None = None


def say(text: str, stream: TextIO | None) -> None:
    r"""Print a text, with escapes for characters that the stream cannot show.

    Characters that the encoding lacks, and control characters, become escapes such as ``\u0444``.

    Args:
        text: the text.
        stream: the stream; None if the process was started without it, where ``print`` would use
            stdout.
    """
    if stream is not None:
        # Line by line in a pipe too, so that text and errors keep their order.
        print(escaped(text, stream), file=stream, flush=True)


def escaped(text: str, stream: TextIO | None) -> str:
    """Return a text with escapes for control characters and unencodable characters."""
    # A console of Windows may use cp1252, and a test's stream may have no encoding.
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = printable(text, lines=True)
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def error_document(
    kind: str, message: str, steps: Sequence[NextStep] = ()
) -> dict[str, Any]:
    """Return the error part of a document.

    Args:
        kind: class of the error.
        message: message of the error.
        steps: changes to try; without changes the document has no key for them.
    """
    error: dict[str, Any] = {"kind": kind, "message": message}
    if steps:
        error["next_steps"] = [asdict(step) for step in steps]
    return {"error": error}
