"""Options that take several values, given more than once."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quark_onnx
from quark_onnx.cli.dispatch import COMMANDS, parse
from quark_onnx.cli.parsing import Parser

ROOT = Path(quark_onnx.__file__).parents[1]
SCRIPT = (
    ROOT / "examples" / "torch" / "language_modeling" / "llm_ptq" / "quantize_quark.py"
)
#: By command: its required arguments.
BASE = {
    "ptq": "llm ptq model -o out --scheme fp8",
    "convert": "convert model.onnx -o out.onnx --to opset",
    "cut": "npu cut model.onnx -o first.onnx second.onnx",
    "deploy": "npu deploy model.onnx -o bundle",
    "quantize": "quantize model.onnx -o out.onnx",
    "search": "search model.onnx -o out",
}


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its commands and actions."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


def options_with_several_values() -> list[tuple[str, argparse.Action]]:
    """Return every option of the command line that takes a list, with the program that it belongs
    to.
    """
    found = []
    for module in COMMANDS:
        command = Parser(module.NAME, "")
        module.add_arguments(command)
        for parser in parsers(command):
            for action in parser._actions:
                if action.option_strings and action.nargs in ("+", "*"):
                    found.append((f"{parser.prog} {action.option_strings[0]}", action))
    return found


def test_every_option_with_several_values_appends() -> None:
    """An option that takes several values appends them to those that were given before.

    None replaces them.
    """
    options = options_with_several_values()
    assert len(options) > 10
    replaced = [
        name for name, action in options if type(action) is argparse._StoreAction
    ]
    assert replaced == []


@pytest.mark.parametrize(
    ("command", "words", "name", "expected"),
    [
        ("ptq", "--export hf_format --export gguf", "export", ["hf_format", "gguf"]),
        (
            "ptq",
            "--export gguf onnx --export hf_format",
            "export",
            ["gguf", "onnx", "hf_format"],
        ),
        ("ptq", "--algorithm awq --algorithm gptq", "algorithm", ["awq", "gptq"]),
        ("ptq", "--tasks a,b --tasks c", "tasks", ["a", "b", "c"]),
        ("ptq", "--exclude a --exclude b", "exclude", ["a", "b"]),
        ("convert", "--to fixed-shapes", "to", ["opset", "fixed-shapes"]),
        ("cut", "--at a --at b c", "at", ["a", "b", "c"]),
        ("deploy", "--cut a --cut b", "cut", ["a", "b"]),
        ("quantize", "--exclude a --exclude b", "exclude", ["a", "b"]),
        (
            "search",
            "--granularity channel --granularity tensor",
            "granularity",
            ["channel", "tensor"],
        ),
    ],
)
def test_values_of_a_repeated_option(
    command: str, words: str, name: str, expected: list[str]
) -> None:
    """A repeated option has the values of all its occurrences, in their order, and none of its
    default.
    """
    options = parse([*BASE[command].split(), *words.split()])
    assert getattr(options, name) == expected


def test_defaults_are_not_shared_between_runs() -> None:
    """Appending to an option leaves its default as it was."""
    parse([*BASE["ptq"].split(), "--algorithm", "awq"])
    assert parse(BASE["ptq"].split()).algorithm == []


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        (
            "--model_export hf_format --model_export gguf",
            "model_export",
            ["hf_format", "gguf"],
        ),
        (
            "--quant_algo awq,gptq --quant_algo rotation",
            "quant_algo",
            ["awq", "gptq", "rotation"],
        ),
        ("--exclude_layers a --exclude_layers b", "exclude_layers", ["a", "b"]),
        ("--tasks a,b --tasks c", "tasks", ["a", "b", "c"]),
    ],
)
def test_repeated_options_of_the_script(
    words: str, name: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options of AMD Quark's script append, too."""
    pytest.importorskip("transformers")
    line = (
        "quantize_quark.py --model_dir model --output_dir out --quant_scheme fp8 "
        + words
    )
    monkeypatch.setattr(sys, "argv", line.split())
    assert getattr(runpy.run_path(str(SCRIPT))["arguments"](), name) == expected
