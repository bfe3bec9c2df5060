"""argparse whose errors are exceptions, and the types of the values that options take."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import NoReturn

from quark_onnx.errors import ConfigError

#: ``--json`` without a file.
STDOUT = "-"
#: Seconds in a unit of time.
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class UsageError(ConfigError):
    """The command line itself is wrong."""


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse prints its usage and ends the process."""

    def __init__(
        self,
        prog: str,
        description: str,
        *,
        epilog: str = "",
        usage: str | None = None,
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            usage=usage,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        if "required: MODEL" in message or "required: FLOAT" in message:
            message += (
                " (models come first: an option that takes several values takes"
                " whatever follows it)"
            )
        raise UsageError(f"{message}; see {self.prog} --help")

    @property
    def flags(self) -> list[str]:
        """All long options."""
        return sorted(
            set(
                re.findall(r"--[a-z][a-z-]*", self.format_usage() + self.format_help())
            ),
        )


def add_common_options(parser: Parser) -> None:
    """What every command takes."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const=STDOUT,
        type=_json_file,
        help=(
            "print JSON with a stable schema to stdout, and nothing else there; with"
            " FILE.json, write it to that file"
        ),
    )
    group.add_argument(
        "--no-isolation",
        dest="isolation",
        action="store_false",
        help=(
            "run onnxruntime in this process, which a native crash then ends; by"
            " default it has one of its own"
        ),
    )
    chatter = group.add_mutually_exclusive_group()
    chatter.add_argument(
        "--quiet",
        action="store_true",
        help="print nothing but warnings, errors and JSON",
    )
    chatter.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="say more: complete lists, and the traceback of a defect",
    )


def add_output_option(parser: Parser, what: str) -> None:
    """Where the model goes that a command makes."""
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=path,
        required=True,
        help=f"the {what} model, written when it is verified",
    )


def add_shape_option(parser: Parser, what: str) -> None:
    """Shapes of inputs; several may follow the option, and it may be repeated."""
    parser.add_argument(
        "--shape",
        metavar="NAME=1,3,224,224",
        type=shape,
        nargs="+",
        action="extend",
        default=[],
        help=what,
    )


def path(text: str) -> Path:
    """A path; an empty one, as an unset shell variable leaves it, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of at least 1",
        )
    return int(text)


def number(text: str) -> float:
    """A finite number or a fraction.

    >>> number("1/255") * 255, number("-0.5")
    (1.0, -0.5)
    """
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    assert isfinite(value)  # Fraction knows neither NaN nor infinity
    return value


def duration(text: str) -> float:
    """A time in seconds: a number, with s, m or h behind it for other units than seconds.

    >>> duration("90"), duration("10m"), duration("1.5h")
    (90.0, 600.0, 5400.0)
    """
    digits, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        seconds = number(digits) * _UNITS[unit]
    except argparse.ArgumentTypeError:
        seconds = 0.0
    if seconds <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time above 0; write it as 90s, 10m or 1.5h",
        )
    return seconds


def dimension(text: str) -> tuple[str, int]:
    """NAME=N, the size of a symbolic dimension."""
    name, _, size = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=N")
    return name, count(size)


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """NAME=N,N,..., the sizes of an input.

    >>> shape("input=1,3,224,224")
    ('input', (1, 3, 224, 224))
    """
    name, _, sizes = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form NAME=1,3,224,224",
        )
    return name, tuple(count(size.strip()) for size in sizes.split(","))


def page(text: str) -> Path:
    """Where a page goes. No other name than *.html, lest it overwrites a model."""
    if not text.lower().endswith((".html", ".htm")):
        raise argparse.ArgumentTypeError(f"{text!r} is not named *.html")
    return Path(text)


def _json_file(text: str) -> str:
    """Where JSON goes. No other name than *.json, lest ``--json model.onnx`` overwrites a model."""
    if text != STDOUT and not text.lower().endswith(".json"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not named *.json; for stdout write --json last, or --json=-",
        )
    if text != STDOUT and not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"there is no folder {str(Path(text).parent)!r}",
        )
    return text
