"""Options that set fields of configurations, with the text of the field as their help.

A field is described once, in the section ``Attributes`` of its class: its first sentence is the
help of its option, and the whole text is its row in the reference of the settings.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any, get_args, get_type_hints

from quark_onnx.cli.parsing import complete, count, number

#: Metavariable of calibrators, optimizers and algorithms.
CALL = "NAME[:SETTING=VALUE,...]"


class FieldOption:
    """Option that sets a field of a configuration.

    Args:
        flag: name of the option.
        owner: class of the configuration.
        field: name of the field, whose type decides how values are parsed.
        note: text after the help, on what holds for the command line alone.
        names: known values, for the completion of shells.
        **arguments: arguments of ``add_argument``, which replace those that follow from the type of
            the field. An option with ``const`` is a switch; the help of a switch that sets False is
            the sentence of the field after "False:".
    """

    def __init__(
        self,
        flag: str,
        owner: type[Any],
        field: str,
        note: str = "",
        *,
        names: Iterable[str] = (),
        **arguments: Any,
    ) -> None:
        self.flag, self.owner, self.field = flag, owner, field
        self.note, self.names = note, names
        # The switches that set True and False share a destination.
        dest = field if "const" in arguments else flag.removeprefix("--")
        self.arguments = {
            "dest": dest.replace("-", "_"),
            **_arguments_by_type(owner, field),
            **arguments,
        }

    @property
    def dest(self) -> str:
        """The attribute of the parsed options."""
        return str(self.arguments["dest"])

    @cached_property
    def help(self) -> str:
        """The sentence of the field that describes the option."""
        texts = field_texts(self.owner)
        before = ".* False: " if self.arguments.get("const") is False else ""
        match = re.match(rf"{before}(.+?)\.( |$)", texts.get(self.field, ""))
        # Python without docstrings (-OO) has no help.
        sentence = match[1] if match else ""
        for name in texts:
            sentence = sentence.replace(f"``{name}``", f"--{name}")
        return sentence.replace("`", "")

    def add(
        self, parser: argparse._ActionsContainer, note: str = "", **arguments: Any
    ) -> None:
        """Add the option to a parser or a group.

        Args:
            parser: the parser or the group.
            note: text after the help, in place of the note of the option.
            **arguments: arguments of ``add_argument`` that differ from those of the option.
        """
        action = parser.add_argument(
            self.flag,
            help=f"{self.help}{note or self.note}",
            **{**self.arguments, **arguments},
        )
        if self.names:
            complete(action, self.names)


def _arguments_by_type(owner: type[Any], field: str) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a value of the type of a field."""
    kind = str(owner.__annotations__[field]).removesuffix(" | None")
    if kind == "bool":
        return {"action": "store_const"}
    if kind.startswith("Literal["):
        return {"choices": get_args(get_type_hints(owner)[field])}
    # Several values, in one option or in several.
    if kind.endswith(", ...]"):
        return {"nargs": "+", "action": "extend"}
    if kind == "int":
        return {"metavar": "N", "type": count}
    if kind == "float":
        return {"metavar": "X", "type": number}
    return {}


def field_texts(owner: type[Any]) -> dict[str, str]:
    """Return the texts of the section ``Attributes`` of a class, by field."""
    _, _, section = (inspect.getdoc(owner) or "").partition("Attributes:\n")
    # The section ends with the first line that is not indented.
    section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
