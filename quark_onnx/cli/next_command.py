"""The command line of a run with changed options, for advice that can be pasted."""

from __future__ import annotations

import os
import shlex
import subprocess
from argparse import Action, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calibrators.shown import printable
from quark_onnx.cli.data import DATA_DESTINATIONS
from quark_onnx.cli.parsing import PROGRAM, Parser
from quark_onnx.report import Report
from quark_onnx.report.verdict import NextStep, Verdict

#: Options of a scaling, which belong together.
#: A step sets all three of them; one that stays from the earlier command would change the scaling.
_SCALING = ("--scale", "--mean", "--std")
#: Options that each name a configuration.
_CONFIGURATIONS = ("--preset", "--recipe", "--config")


@dataclass(frozen=True)
class _Part:
    """An option with its values, or a positional argument.

    Attributes:
        words: the words of the command line.
        action: the option; None for a positional argument.
    """

    words: tuple[str, ...]
    action: Action | None = None


def with_commands(steps: Iterable[NextStep], options: Namespace) -> list[NextStep]:
    """Return steps with the complete command line where options make the change.

    Args:
        steps: the steps.
        options: the options of the command, with its words as ``words`` and its parser.
    """
    return [_with_command(step, options) for step in steps]


def report_with_commands(report: Report, options: Namespace) -> Report:
    """Return a report whose verdict has complete command lines."""
    return replace(report, verdict=verdict_with_commands(report.verdict, options))


def verdict_with_commands(
    verdict: Verdict | None, options: Namespace
) -> Verdict | None:
    """Return a verdict with complete command lines."""
    if verdict is None:
        return None
    steps = with_commands(verdict.next_steps, options)
    return replace(verdict, next_steps=tuple(steps))


def next_command(
    words: Sequence[str],
    parser: Parser,
    changes: Sequence[str],
    without: Iterable[str] = (),
    *,
    first: bool = False,
) -> str:
    """Return a command line with changed options, quoted for the shell; see ``next_words``."""
    changed = next_words(words, parser, changes, without, first=first)
    return shell_line([PROGRAM, *changed])


def next_words(
    words: Sequence[str],
    parser: Parser,
    changes: Sequence[str],
    without: Iterable[str] = (),
    *,
    first: bool = False,
) -> list[str]:
    """Return the words of a command with changed options, after the program's name.

    An option replaces its earlier value and the options that exclude it. An option that collects
    values keeps the earlier values.

    Args:
        words: the words of the command line after the program's name.
        parser: the parser of the command or its action.
        changes: the words of the options to set.
        without: further options to leave out.
        first: whether the changes come before the earlier options, for options that collect values
            of which the first match wins.
    """
    parts, trailing = _split(words, parser)
    changed, _ = _split(changes, parser)
    # By identity: actions of argparse define no equality, and one action has several names.
    unwanted = {id(parser.options[name]) for name in without}
    for part in changed:
        unwanted |= {id(action) for action in _replaced(part.action, parser)}
    kept = [part for part in parts if id(part.action) not in unwanted]
    ordered = [*changed, *kept] if first else [*kept, *changed]
    # positional arguments first: an option of several values would take them
    ordered.sort(key=lambda part: part.action is not None)
    result = [word for part in ordered for word in part.words]
    return [*result, *trailing]


def analysis_step(reference: Path, other: Path, options: Namespace) -> NextStep:
    """Return the step to analyze a quantized model on the data of this command.

    Args:
        reference: the float model.
        other: the quantized model.
        options: as for ``with_commands``.
    """
    words = [PROGRAM, "analyze", str(reference), str(other), *data_words(options)]
    return NextStep(
        "",
        "shows the tensors with the greatest errors, their causes and options that help",
        "analyze(model, quantized, data)",
        shell_line(words),
    )


def data_words(options: Namespace) -> list[str]:
    """Return the words of a command line that select the data and libraries of operators."""
    words = list[str]()
    kept = (*DATA_DESTINATIONS, "custom_op_library")
    for part in _split(options.words, options.parser)[0]:
        # Each option with its own values, as the user wrote them.
        if part.action is not None and part.action.dest in kept:
            words += part.words
    return words


def changes_data(step: NextStep) -> bool:
    """Return whether a step changes how the data is read."""
    first_option = next(iter(shlex.split(step.options)), "")
    return first_option in (*_SCALING, "--color", "--layout")


def shell_line(words: Sequence[str]) -> str:
    """Quote the words of a command for the shell of this system."""
    # cmd.exe knows double quotes alone; shlex uses single ones.
    if os.name == "nt":
        return subprocess.list2cmdline(words)
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    r"""Quote a word for a POSIX shell; control characters stay escapes that the shell reads.

    >>> print(_quoted("a b"), _quoted("it's\ntwo"))
    'a b' $'it\'s\ntwo'
    """
    escaped = word.replace("\\", r"\\").replace("'", r"\'")
    shown = printable(escaped)
    # A terminal shows control characters as escapes; between $'...' they are read as such.
    return shlex.quote(word) if shown == escaped else f"$'{shown}'"


def step_words(step: NextStep, options: Namespace) -> list[str] | None:
    """Return the words of the command that makes a change, after the program's name.

    None for a change that no option makes: more data or other code.
    """
    changes = shlex.split(step.options)
    if not changes:
        return None
    if not changes_data(step):
        without = _doubtful(changes, options)
    # --image-size is what makes the data a folder of images.
    elif getattr(options, "image_size", None) is not None:
        changes, without = _changes_of_images(changes, options)
    elif changes[0] == "--layout":
        changes, without = _changes_of_arrays(options)
    else:
        return None  # the arrays must be made anew
    return next_words(options.words, options.parser, changes, without)


def _with_command(step: NextStep, options: Namespace) -> NextStep:
    words = step_words(step, options)
    # The command of another run is complete.
    if words is None or step.command:
        return step
    return replace(step, command=shell_line([PROGRAM, *words]))


def _changes_of_images(
    changes: Sequence[str], options: Namespace
) -> tuple[list[str], list[str]]:
    """Return the options to set, and those to leave out, for another reading of images."""
    changes = list(changes)
    # The advice knows that the channels look swapped, and not their present order.
    if changes[-1] == "swapped":
        changes[-1] = "rgb" if options.image_color == "bgr" else "bgr"
    if set(_SCALING).isdisjoint(changes):
        return changes, []
    return changes, list(_SCALING)


def _changes_of_arrays(options: Namespace) -> tuple[list[str], list[str]]:
    """Return the options to set, and those to leave out, for the other layout of arrays."""
    if options.input_layout is None:
        return ["--input-layout", "nhwc"], []
    return [], ["--input-layout"]


def _doubtful(changes: Sequence[str], options: Namespace) -> list[str]:
    """Return options to leave out of a command with another setting of the quantization.

    Options that name a configuration exclude each other. A calibrator that was chosen is a likely
    cause of a bad verdict, so no command keeps it.
    """
    doubtful = list[str]()
    if changes[0] in _CONFIGURATIONS:
        doubtful += _CONFIGURATIONS
    if getattr(options, "calibrator", None) is not None:
        doubtful.append("--calibrator")
    # compare has no options of a configuration.
    return [name for name in doubtful if name in options.parser.options]


def _split(words: Sequence[str], parser: Parser) -> tuple[list[_Part], list[str]]:
    """Return options and positional arguments, and the words from ``--`` on."""
    parts, index = list[_Part](), 0
    # After "--" every word is positional.
    while index < len(words) and words[index] != "--":
        action, attached = parser.option_of(words[index])
        end = index + 1
        if action is not None and not attached:
            end = _values_end(words, end, action, parser)
        parts.append(_Part(tuple(words[index:end]), action))
        index = end
    return parts, list(words[index:])


def _values_end(
    words: Sequence[str], start: int, action: Action, parser: Parser
) -> int:
    """Return the index after the values of an option."""
    # One value. A number as nargs: as many; "?", "*" and "+": up to the next option.
    if action.nargs is None:
        return start + 1
    if isinstance(action.nargs, int):
        return start + action.nargs
    most = min(start + 1, len(words)) if action.nargs == "?" else len(words)
    end = start
    while end < most and words[end] != "--" and parser.option_of(words[end])[0] is None:
        end += 1
    return end


def _replaced(action: Action | None, parser: Parser) -> list[Action]:
    """Return the options that an option replaces."""
    assert action is not None, "changes are options"
    # The classes of argparse for action="append" and "extend" are private.
    collects = type(action).__name__ in ("_AppendAction", "_ExtendAction")
    same = [] if collects else parser.with_destination(action.dest)
    return [*same, *parser.excluded_by(action)]
