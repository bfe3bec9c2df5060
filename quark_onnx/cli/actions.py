"""Actions: the second word of commands such as ``quark-onnx llm ptq``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import Parser, add_common_options


@dataclass(frozen=True)
class Action:
    """Action of a command.

    Attributes:
        name: the word.
        summary: what it does, beginning with a verb.
        usage: usage line.
        add_arguments: function that adds its arguments to a parser.
        perform: function that runs it.
    """

    name: str
    summary: str
    usage: str
    add_arguments: Callable[[Parser], None]
    perform: Callable[[Namespace], Answer]


def add_actions(parser: Parser, actions: Iterable[Action], *, sessions: bool) -> None:
    """Add the parsers of actions to the parser of their command.

    Args:
        parser: the parser of the command.
        actions: the actions, in the order of the help.
        sessions: as for ``add_common_options``.
    """
    subparsers = parser.add_subparsers(
        dest="action",
        metavar=f"{{{','.join(action.name for action in actions)}}}",
        required=True,
        parser_class=Parser,
        prog=parser.prog,
    )
    for action in actions:
        summary = action.summary
        subparser = subparsers.add_parser(
            action.name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog="",
            usage=action.usage,
        )
        action.add_arguments(subparser)
        add_common_options(subparser, sessions=sessions)
        # Of the action, and not of the command: advice repeats its options.
        subparser.set_defaults(perform=action.perform, parser=subparser)
