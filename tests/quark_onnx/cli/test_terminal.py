"""Terminals get colour and tables; pipes get plain text; shells get completions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quark_onnx

pty = pytest.importorskip("pty", reason="there are no pseudo-terminals on Windows")
ROOT = Path(quark_onnx.__file__).parents[1]
PLAIN = {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}


def on_terminal(*arguments: str, **environment: str) -> str:
    """Return what the command line prints on a terminal, both streams together."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "quark_onnx", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, **PLAIN, **environment},
    )
    os.close(theirs)
    printed = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux has no end of file here
            break
        if not part:
            break
        printed += part
    process.wait(timeout=300)
    os.close(ours)
    return printed.decode()


def test_errors_are_red() -> None:
    text = on_terminal("explain", "absent.onnx")
    assert text.startswith("quark-onnx: \x1b[1;31merror\x1b[0m: model file absent.onnx")


def test_tables_fit_the_terminal() -> None:
    text = on_terminal("list", "recipes", COLUMNS="70", NO_COLOR="1")
    assert "transformer" in text and "\N{BOX DRAWINGS LIGHT HORIZONTAL}" in text
    shown = re.sub(r"\x1b\[\d*m", "", text)
    assert max(map(len, shown.splitlines())) <= 70


def test_titles_are_set_off() -> None:
    text = on_terminal("explain", "model.onnx")
    assert "\x1b[1;36mplan     \x1b[0m" in text


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_dumb_terminal_gets_plain_text(term: str) -> None:
    assert "\x1b[" not in on_terminal("explain", "model.onnx", TERM=term)


def test_names_cannot_act_on_the_terminal() -> None:
    text = on_terminal("explain", "a\x1b[31m[bold]b.onnx")
    assert "a\\x1b[31m[bold]b.onnx" in text


def completions(line: str) -> list[str]:
    """Return what argcomplete hands a shell for a line."""
    pytest.importorskip("argcomplete")
    reader, writer = os.pipe()
    environment = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": " ",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    script = f"exec {sys.executable} -m quark_onnx 8>&{writer} 9>/dev/null"
    process = subprocess.Popen(
        ["bash", "-c", script],
        pass_fds=[writer],
        env={**os.environ, **PLAIN, **environment},
    )
    os.close(writer)
    with os.fdopen(reader) as pipe:
        found = pipe.read().split()
    process.wait(timeout=300)
    return found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("quark-onnx qu", ["quantize"]),
        ("quark-onnx quantize m.onnx --preset XI", ["XINT8"]),
        ("quark-onnx convert m.onnx --to fl", ["float16", "float32"]),
        ("quark-onnx npu deploy m.onnx --recipe de", ["depthwise", "detector"]),
    ],
)
def test_completions(line: str, expected: list[str]) -> None:
    assert sorted(completions(line)) == expected
