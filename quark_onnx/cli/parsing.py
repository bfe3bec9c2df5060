"""Argument parser that raises exceptions, and types of option values."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import NoReturn

from quark_onnx.common.errors import ConfigError
from quark_onnx.files.overwrites import (
    SAMPLE_SUFFIXES,
    Input,
    Output,
    refuse_overwrites,
)

#: Name of the command.
PROGRAM = "quark-onnx"
#: ``--json`` without a file.
STDOUT = "-"
#: Seconds in a unit of time.
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


#: Columns of the names of options in a help text, and of the whole text.
_NAMES, _WIDTH = 32, 118


class UsageError(ConfigError):
    """The command line is wrong."""


@dataclass(frozen=True)
class InputPath:
    """Type of an option or argument whose value is a path that the command reads.

    Attributes:
        parse: function of the text that returns the value.
        suffixes: endings of the files that are read in a folder; None for every file.
    """

    parse: Callable[[str], Path | str]
    suffixes: frozenset[str] | None = None

    def __call__(self, text: str) -> Path | str:
        return self.parse(text)


@dataclass(frozen=True)
class OutputPath:
    """Type of an option or argument whose value is a path that the command writes.

    Attributes:
        parse: function of the text that returns the value.
        replaced: True for a folder that is replaced with all that it holds.
        files: names of the files that a folder receives, whose other files stay.
    """

    parse: Callable[[str], Path | str]
    replaced: bool = False
    files: tuple[str, ...] = ()

    def __call__(self, text: str) -> Path | str:
        return self.parse(text)


def check_paths(options: argparse.Namespace, parser: Parser) -> None:
    """Check that no output of a command replaces one of its inputs or another output.

    Args:
        options: the options of the command.
        parser: its parser, where each path is declared as an input or an output.

    Raises:
        ConfigError: names the two options.
    """
    inputs, outputs = list[Input](), list[Output]()
    for action in parser.arguments:
        kind = action.type
        for path in _paths_of(getattr(options, action.dest, None)):
            if isinstance(kind, InputPath):
                inputs.append(Input(_shown_name(action), path, kind.suffixes))
            elif isinstance(kind, OutputPath):
                name = _shown_name(action)
                outputs.append(Output(name, path, kind.replaced, kind.files))
    refuse_overwrites(inputs, outputs)


def _paths_of(value: object) -> list[Path]:
    """Return the paths in the value of an option."""
    if isinstance(value, list | tuple):
        return [path for item in value for path in _paths_of(item)]
    if isinstance(value, str | Path) and value != STDOUT:
        return [Path(value)]
    return []


def _shown_name(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar)
    return max(action.option_strings, key=len)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter with a line for each option: names, meaning, and default.

    The default is the parser's own, so that both always agree.
    """

    def __init__(self, prog: str) -> None:
        # Without a terminal, as in documentation, 100 columns.
        columns = shutil.get_terminal_size((100, 24)).columns
        super().__init__(prog, max_help_position=_NAMES, width=min(columns, _WIDTH) - 2)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # Positional arguments and switches have no value to show.
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        names = ", ".join(action.option_strings)
        return f"{names} {self._format_args(action, action.dest.upper())}"

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        # argparse writes "[NAME ...]" twice for "+": "NAME [NAME ...]".
        (name,) = self._metavar_formatter(action, default_metavar)(1)[:1]
        if action.nargs == argparse.ONE_OR_MORE:
            return f"{name} ..."
        if action.nargs == argparse.ZERO_OR_MORE:
            return f"[{name} ...]"
        return super()._format_args(action, default_metavar)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = shown_default(action)
        # A text that explains its default needs no second one.
        if not default or "(default" in (action.help or ""):
            return action.help
        return f"{action.help} (default: {default})"


def shown_default(action: argparse.Action) -> str:
    """Return the default of an option as a user would write it; empty without one.

    Switches are off by default and have no text.
    """
    value = action.default
    if not action.option_strings or value == argparse.SUPPRESS:
        return ""
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, str):
        return value
    # For example 0 0 0, the mean of images.
    if isinstance(value, Iterable):
        return " ".join(f"{item:g}" for item in value)
    return f"{value:g}"


class Parser(argparse.ArgumentParser):
    """Parser that raises UsageError where argparse would end the process."""

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
            # An abbreviation would break when another option with the same beginning is added.
            allow_abbrev=False,
            formatter_class=HelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        # "--exclude a b model.onnx" has taken the model as a third pattern.
        if "required: MODEL" in message or "required: FLOAT" in message:
            message += (
                " (models come first: an option that takes several values takes"
                " whatever follows it)"
            )
        raise UsageError(f"{message}; see {self.prog} --help")

    @property
    def options(self) -> dict[str, argparse.Action]:
        """Return the options by name; an option with two names occurs twice."""
        # Private in argparse, as are the groups below; there is no public list of options.
        return self._option_string_actions

    def option_of(self, word: str) -> tuple[argparse.Action | None, bool]:
        """Return the option of a word, and whether its value is attached.

        Args:
            word: a word of the command line, such as ``--preset``, ``--preset=A8W8`` or
                ``-oFILE``.
        """
        # In this order: a word that is an option is never a shorter one with a value.
        if word in self.options:
            return self.options[word], False
        name, equals, _ = word.partition("=")
        if equals and name in self.options:
            return self.options[name], True
        # -oFILE: a short option with its value.
        if word[:1] == "-" and word[:2] in self.options:
            return self.options[word[:2]], True
        return None, False

    @property
    def arguments(self) -> list[argparse.Action]:
        """Return the options and positional arguments."""
        return list(self._actions)

    def with_destination(self, name: str) -> list[argparse.Action]:
        """Return the options that set an attribute."""
        return [action for action in self._actions if action.dest == name]

    def excluded_by(self, action: argparse.Action) -> list[argparse.Action]:
        """Return the options that are not allowed together with an option."""
        excluded = list[argparse.Action]()
        for group in self._mutually_exclusive_groups:
            if action in group._group_actions:
                excluded += group._group_actions
        return [other for other in excluded if other is not action]


def complete(action: argparse.Action, names: Iterable[str]) -> None:
    """Let shells complete the values of an option; argcomplete reads the attribute."""
    values = list(names)

    def completer(**_: object) -> list[str]:
        return values

    setattr(action, "completer", completer)  # noqa: B010  (argparse does not declare it)


def add_common_options(parser: Parser, *, sessions: bool = True) -> None:
    """Add the options of every command.

    Args:
        parser: the parser of the command.
        sessions: whether the command runs models of the user in onnxruntime.
    """
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const=STDOUT,
        type=OutputPath(_json_file),
        help="write the answer as JSON, to stdout or to FILE.json",
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an earlier result folder; files are replaced without it",
    )
    group.add_argument(
        "--no-isolation",
        dest="isolation",
        action="store_false",
        help="run onnxruntime in this process, which a native crash ends",
    )
    if sessions:
        group.add_argument(
            "--custom-op-library",
            metavar="FILE",
            type=input_path,
            action="append",
            default=[],
            help="native library with custom operators of the model; may be repeated",
        )
    chatter = group.add_mutually_exclusive_group()
    chatter.add_argument(
        "--quiet",
        action="store_true",
        help="print only warnings, errors and JSON",
    )
    chatter.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print complete lists, and tracebacks of internal errors",
    )


def progress_of(options: argparse.Namespace) -> bool | None:
    """Return whether to draw a progress bar: none with --quiet, else on a terminal."""
    # None: the progress bar decides by the terminal.
    return False if options.quiet else None


def add_html_option(parser: argparse._ActionsContainer, what: str) -> None:
    """Add the option for an HTML page."""
    parser.add_argument("--html", metavar="FILE", type=OutputPath(_page), help=what)


def add_model_argument(
    parser: Parser,
    what: str = "float model, an .onnx file; it is not changed",
    metavar: str = "MODEL",
) -> None:
    """Add the argument for the path of the model."""
    parser.add_argument("model", metavar=metavar, type=input_path, help=what)


def add_output_option(parser: Parser, adjective: str) -> None:
    """Add the option for the path of the output model."""
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=output_file,
        required=True,
        help=f"write the {adjective} model here; an earlier file is replaced",
    )


def add_shape_option(parser: Parser, what: str) -> None:
    """Add the option for input shapes, which takes several values and may be repeated."""
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
    """Parse a path; refuse an empty one, as from an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


#: Types of paths.
input_path = InputPath(path)
sample_path = InputPath(path, SAMPLE_SUFFIXES)
#: A path or another name, such as that of a preset or a data set.
input_name = InputPath(str)
output_file = OutputPath(path)
output_folder = OutputPath(path, replaced=True)


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    # int() alone would accept "-3", " 3" and "1_000".
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of at least 1",
        )
    return int(text)


def batch_axis(text: str) -> int | str | None:
    """Parse an axis, ``none`` or ``auto``."""
    if text == "auto":
        return text
    if text == "none":
        return None
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an axis, such as 0, nor none for a model without a batch axis"
        )
    return int(text)


def number(text: str) -> float:
    """Parse a finite number or a fraction.

    >>> number("1/255") * 255, number("-0.5")
    (1.0, -0.5)
    """
    try:
        # Fraction reads 1/255, 0.5 and 1e-3.
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    assert isfinite(value)  # Fraction knows neither NaN nor infinity
    return value


def duration(text: str) -> float:
    """Parse a duration with an optional unit s, m or h; return seconds.

    >>> duration("90"), duration("10m"), duration("1.5h")
    (90.0, 600.0, 5400.0)
    """
    # text[-1:] of an empty text is empty, and no unit.
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
    """Parse NAME=N, the size of a symbolic dimension."""
    # From the right: names of dimensions may contain "=".
    name, _, size = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=N")
    return name, count(size)


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse NAME=N,N,..., the sizes of an input.

    >>> shape("input=1,3,224,224")
    ('input', (1, 3, 224, 224))
    """
    name, _, sizes = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form NAME=1,3,224,224",
        )
    return name, tuple(count(size.strip()) for size in sizes.split(","))


def image_size(text: str) -> tuple[int, int]:
    """Parse height and width: a single number for both, or HxW.

    >>> image_size("224"), image_size("480x640")
    ((224, 224), (480, 640))
    """
    height, cross, width = text.lower().partition("x")
    try:
        # Without a cross, a square.
        return count(height), count(width if cross else height)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an image size; write it as 224 or 480x640 (height x"
            " width, in pixels)",
        ) from None


def in_words(arguments: list[str]) -> list[str]:
    """Bring the numbers of image options into the words that the parser takes.

    >>> in_words(["--image-size", "480", "640", "model.onnx", "--mean", "0.5,0.5,0.5"])
    ['--image-size', '480x640', 'model.onnx', '--mean', '0.5', '0.5', '0.5']
    """
    joined = list[str]()
    for word in arguments:
        # The option takes HxW in one word; H and W in two words are accepted, too.
        follows_height = joined[-2:-1] == ["--image-size"] and joined[-1].isdecimal()
        if follows_height and word.isdecimal():
            joined[-1] += f"x{word}"
        elif joined[-1:] in (["--mean"], ["--std"]):
            joined += word.split(",")
        else:
            joined.append(word)
    return joined


def rename_options(
    arguments: list[str],
    renamed: Mapping[str, str],
) -> tuple[list[str], list[str]]:
    """Replace deprecated names of options.

    Args:
        arguments: the command line.
        renamed: deprecated name -> name.

    Returns:
        The command line with today's names, and a warning for each deprecated one.

    >>> rename_options(["--page=a.html", "x"], {"--page": "--html"})
    (['--html=a.html', 'x'], ['--page is deprecated; write --html'])
    """
    changed, warnings = list[str](), list[str]()
    for word in arguments:
        name, equals, value = word.partition("=")
        if name in renamed:
            warnings.append(f"{name} is deprecated; write {renamed[name]}")
            name = renamed[name]
        changed.append(f"{name}{equals}{value}")
    return changed, warnings


def _page(text: str) -> Path:
    """Parse the path of a page; only *.html, so that no model is overwritten."""
    if not text.lower().endswith((".html", ".htm")):
        raise argparse.ArgumentTypeError(f"{text!r} is not named *.html")
    _check_folder(text)
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file")
    return Path(text)


def _json_file(text: str) -> str:
    """Parse a path for JSON; only *.json, so that ``--json model.onnx`` is refused."""
    if text == STDOUT:
        return text
    if not text.lower().endswith(".json"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not named *.json; for stdout write --json last, or --json=-",
        )
    _check_folder(text)
    return text


def _check_folder(text: str) -> None:
    # Before the work: a file that cannot be written would be noticed at the end.
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"there is no folder {str(Path(text).parent)!r}"
        )
