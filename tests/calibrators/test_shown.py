"""Names out of files reach terminals and logs: what these would act on is escaped, in one place."""

from __future__ import annotations

import pytest

from calibrators.errors import CalibrationError
from calibrators.shown import clipped, printable, short
from quark_onnx.common.errors import ModelError

HOSTILE = {
    "colour": ("\x1b[31mred", r"\x1b[31mred"),
    "title": ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
    "one byte for both": ("\x9b31m", r"\x9b31m"),
    "back to the start": ("sure\rfake", r"sure\rfake"),
    "back one": ("a\x08b", r"a\x08b"),
    "another line": ("a\nb", r"a\nb"),
    "a line of Unicode": ("a\u2028b", r"a\u2028b"),
    "right to left": ("\u202egnp.exe", r"\u202egnp.exe"),
    "isolates": ("\u2066a\u2069", r"\u2066a\u2069"),
    "no width": ("a\u200bb", r"a\u200bb"),
    "half a pair": ("\ud800", r"\ud800"),
    "beyond 16 bits": ("\U000e0041", r"\U000e0041"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_a_terminal_would_act_on_is_escaped(case: str) -> None:
    text, shown = HOSTILE[case]
    assert printable(text) == shown and shown.isprintable()
    for error in (ModelError(text), CalibrationError(text)):
        assert printable(str(error), lines=True) == str(error)
        assert "\x1b" not in str(error)


def test_other_text_stays() -> None:
    text = "Übergröße 层 /a/b.1:0 'x' 😀"
    assert printable(text) == text
    assert printable("a\n\tb", lines=True) == "a\n\tb"


def test_values_and_lines_are_cut() -> None:
    assert len(short({str(place): ["x" * 1000] * 1000 for place in range(1000)})) <= 203
    assert short("x") == "'x'"
    assert len(clipped("x" * 10_000)) <= 2000
    assert clipped("x" * 2000) == "x" * 2000
