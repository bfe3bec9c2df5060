"""Options that the texts of 'quark-onnx llm' propose are options of the command they name."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quark_onnx
from quark_onnx.cli.dispatch import build_parser

ROOT = Path(quark_onnx.__file__).parent
#: Modules whose texts are advice for one action, where they name no other command.
MODULES = {
    "ptq": (
        "cli/llm_ptq.py",
        "torch/config/language_recipes.py",
        "torch/pipelines/client_check.py",
        "torch/pipelines/ptq.py",
        "torch/pipelines/verdict.py",
    ),
    "oga": ("cli/llm_oga.py", "torch/exports/oga.py", "torch/exports/oga_cache.py"),
    "search": ("cli/llm_search.py", "torch/pipelines/scheme_search.py"),
}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+\b(?!_)")


def parsers() -> dict[str, Any]:
    """The parser of each action of 'quark-onnx llm'."""
    llm = build_parser()[1]["llm"]
    (actions,) = (
        each for each in llm._actions if isinstance(each, argparse._SubParsersAction)
    )
    return dict(actions.choices)


PARSERS = parsers()
#: A command in a text, up to the end of its quotation or clause.
COMMAND = re.compile(rf"\bllm ({'|'.join(PARSERS)})\b([^';,:()\n]*)")


def texts(file: Path) -> Iterator[str]:
    """Yield the strings of a module, with a word for each value in them; no docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    inside = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            inside |= set(map(id, node.values))
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "VALUE"
                for part in node.values
            )
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in inside:
            yield node.value


def test_options_of_named_commands() -> None:
    """A text that says 'llm ACTION --option' names an option of that action."""
    found = 0
    for file in sorted(ROOT.rglob("*.py")):
        for text in texts(file):
            for action, rest in COMMAND.findall(text):
                for option in OPTION.findall(rest):
                    found += 1
                    assert option in PARSERS[action].options, (file, text)
    assert found > 20


@pytest.mark.parametrize("action", MODULES)
def test_options_of_the_same_command(action: str) -> None:
    """Advice without a command is about options of the command that gives it."""
    for name in MODULES[action]:
        for text in texts(ROOT / name):
            # names of options and words of commands; commands of AMD's tools
            if " " not in text or text.startswith("model_generate"):
                continue
            for option in OPTION.findall(COMMAND.sub("", text)):
                assert option in PARSERS[action].options, (name, text)


def test_the_command_of_oga_parses() -> None:
    """An error of the quantization within 'llm oga' proposes a command of 'llm ptq'."""
    from quark_onnx.cli.llm_oga import ptq_command

    words = (
        "llm oga my -o out --data t.txt --length 8 --algorithm awq gptq --trust-code"
    )
    parser, _ = build_parser()[:2]
    options = parser.parse_args(words.split())
    program, *command = ptq_command(options).split()
    assert program == "quark-onnx"
    again = parser.parse_args(command)
    assert (again.action, again.layout) == ("ptq", "oga")
    for name in ("model", "data", "samples", "length", "algorithm", "trust_code"):
        assert getattr(again, name) == getattr(options, name)
