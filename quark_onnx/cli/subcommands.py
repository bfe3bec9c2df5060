"""Subcommands such as ``ptq`` in ``quark-onnx llm ptq``; users know them as actions."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import Parser, add_common_options


@dataclass(frozen=True)
class Subcommand:
    """Subcommand of a command.

    Attributes:
        name: its name on the command line.
        summary: description that begins with a verb.
        usage: usage line.
        add_arguments: function that adds the arguments to a parser.
        perform: function that runs the subcommand.
    """

    name: str
    summary: str
    usage: str
    add_arguments: Callable[[Parser], None]
    perform: Callable[[Namespace], Answer]


def add_subcommands(
    parser: Parser, subcommands: Sequence[Subcommand], *, sessions: bool
) -> None:
    """Add the parsers of subcommands to the parser of their command.

    Args:
        parser: the parser of the command.
        subcommands: the subcommands, in the order of the help.
        sessions: as for ``add_common_options``.
    """
    names = ",".join(subcommand.name for subcommand in subcommands)
    subparsers = parser.add_subparsers(
        dest="action",
        metavar=f"{{{names}}}",
        required=True,
        parser_class=Parser,
        prog=parser.prog,
    )
    for subcommand in subcommands:
        summary = subcommand.summary
        subparser = subparsers.add_parser(
            subcommand.name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog="",
            usage=subcommand.usage,
        )
        subcommand.add_arguments(subparser)
        add_common_options(subparser, sessions=sessions)
        # Advice repeats the options of the subcommand, and not those of the command.
        subparser.set_defaults(perform=subcommand.perform, parser=subparser)
