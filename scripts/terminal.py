"""Run a command on a terminal of 110 columns and write what it shows as an SVG picture.

    python scripts/terminal.py docs/assets/quantize.svg -- quark-onnx quantize model.onnx ...

Needs rich, which the extra ``docs`` has, and a system with pseudo-terminals. Progress bars are left
out: the picture has the last state of each line.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COLUMNS = 110
THEME = TerminalTheme(
    (13, 17, 23),
    (230, 237, 243),
    [
        (72, 79, 88),
        (255, 123, 114),
        (63, 185, 80),
        (210, 153, 34),
        (88, 166, 255),
        (188, 140, 255),
        (57, 197, 207),
        (177, 186, 196),
    ],
)


def shown(command: list[str]) -> tuple[str, int]:
    """Run a command in a pseudo-terminal; return its output with ANSI codes, and its exit code."""
    os.environ |= {"COLUMNS": str(COLUMNS), "LINES": "50", "TERM": "xterm-256color"}
    chunks: list[bytes] = []

    def read(descriptor: int) -> bytes:
        chunk = os.read(descriptor, 4096)
        chunks.append(chunk)
        return chunk

    status = pty.spawn(command, read)
    text = b"".join(chunks).decode("utf-8", "replace").replace("\r\n", "\n")
    lines = [line.rpartition("\r")[2] for line in text.split("\n")]
    return "\n".join(lines), os.waitstatus_to_exitcode(status)


def picture(command: list[str], output: str) -> str:
    """Return the SVG of a prompt with a command and its output."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text.assemble(("$ ", "bold green"), shlex.join(command)))
        console.print(Text.from_ansi(re.sub(r"\x1b\[[0-9;]*[A-HJKf]", "", output)))
        svg = console.export_svg(title="quark-onnx", theme=THEME, unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def main() -> int:
    """Write the picture; the exit code is that of the command."""
    target, separator, *command = sys.argv[1:]
    if separator != "--" or not command:
        print(__doc__)
        return 2
    output, code = shown(command)
    Path(target).write_text(picture(command, output), encoding="utf-8", newline="\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
