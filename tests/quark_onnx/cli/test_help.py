"""Help texts: short, one line an option, with the defaults that the parsers have."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

import pytest

from quark_onnx.cli.dispatch import COMMANDS
from quark_onnx.cli.parsing import Parser, shown_default

#: Words of one help text, without the default, and columns that a help line may have.
WORDS, COLUMNS = 14, 118


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers_of(child)


def every_parser() -> list[argparse.ArgumentParser]:
    """Return the parser of each command and of each action."""
    found = list[argparse.ArgumentParser]()
    for module in COMMANDS:
        command = Parser(f"quark-onnx {module.NAME}", "")
        module.add_arguments(command)
        found += parsers_of(command)
    return found


def visible(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [
        each for each in parser._actions if each.help not in (None, argparse.SUPPRESS)
    ]


PARSERS = {parser.prog: parser for parser in every_parser()}


@pytest.mark.parametrize("name", PARSERS)
def test_help_prints_the_defaults_of_the_parser(name: str) -> None:
    """An option's help has the parser's default once, and no other."""
    for action in visible(PARSERS[name]):
        assert "(default" not in (action.help or ""), action.option_strings
    text = PARSERS[name].format_help()
    printed = re.findall(r"\(default: ([^)]*)\)", " ".join(text.split()))
    expected = [shown_default(action) for action in visible(PARSERS[name])]
    assert sorted(printed) == sorted(filter(None, expected))


@pytest.mark.parametrize("name", PARSERS)
def test_help_of_an_option_is_one_short_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    for action in visible(PARSERS[name]):
        assert action.help and len(action.help.split()) <= WORDS, action
        assert not action.help.endswith("."), action
    text = PARSERS[name].format_help()
    options = text.partition("options:")[2].partition("\nexample")[0]
    wrapped = re.findall(r"^ {32}\S.*\n {32}\S.*$", options, re.MULTILINE)
    assert wrapped == [], "an option whose help takes two lines"
    assert max(map(len, text.partition("\nexample")[0].splitlines())) <= COLUMNS


@pytest.mark.parametrize("name", PARSERS)
def test_help_names_options_that_exist(name: str) -> None:
    """A help that refers to another option has an option of the same command."""
    flags = {flag for each in PARSERS[name]._actions for flag in each.option_strings}
    for action in visible(PARSERS[name]):
        named = set(re.findall(r"--[a-z][a-z-]*", action.help or ""))
        assert named <= flags, action.option_strings


def test_a_name_stands_for_one_thing() -> None:
    """Pages are --html everywhere, presets --preset; nothing written is called a report."""
    named = [(name, flag) for name, each in PARSERS.items() for action in visible(each)
             for flag in action.option_strings]  # fmt: skip
    assert not {flag for _, flag in named} & {"--page", "--report", "--presets"}
    assert [name for name, flag in named if flag == "--kind"] == ["quark-onnx llm gguf"]
    pages = {
        name.removeprefix("quark-onnx ") for name, flag in named if flag == "--html"
    }
    assert {"analyze", "search", "npu preflight", "llm ptq"} <= pages


@pytest.mark.images
@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        (["8"], ""),
        (["8x8"], ""),
        (["8", "8"], ""),
        (["8x"], "'8x' is not an image size"),
    ],
)
def test_image_sizes(cli: Any, sizes: list[str], word: str) -> None:
    """One number, HxW and two numbers mean the same, whatever follows them."""
    finished = cli(
        "compare", "--image-size", *sizes, "model.onnx", "model.onnx", "--data=data"
    )
    assert word or "no image in data" in finished.error
    assert word in finished.error


def test_deprecated_names_still_work(cli: Any) -> None:
    finished = cli("npu", "preflight", "model.onnx", "--kind", "XINT8", "--page=p.html")
    assert finished.code == 0
    assert finished.err.splitlines() == [
        "quark-onnx: warning: --kind is deprecated; write --preset",
        "quark-onnx: warning: --page is deprecated; write --html",
    ]
    finished = cli("explain", "model.onnx", "--config", "S8S8")
    assert (finished.code, finished.err) == (
        0,
        "quark-onnx: warning: --config takes a YAML file; write --preset S8S8\n",
    )


def test_a_number_as_target_of_a_search_means_decibels(cli: Any) -> None:
    finished = cli("search", "model.onnx", "--data", "none", "--target", "25")
    assert finished.err.startswith(
        "quark-onnx: warning: --target names a device; write --min-sqnr 25\n"
    )


def test_part_of_a_name_suggests_a_glob(cli: Any) -> None:
    finished = cli("explain", "model.onnx", "--exclude", "l")
    assert finished.error.endswith("matches 'l'; did you mean '*l*' (3 nodes)?")
