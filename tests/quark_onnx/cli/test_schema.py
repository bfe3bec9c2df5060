"""The published JSON schema describes what every command writes, key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema")

SCHEMA = json.loads(
    (files("quark_onnx.cli") / "answers.schema.json").read_text(encoding="utf-8")
)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
QUANTIZE = "quantize model.onnx -o q.onnx --data data"
#: Commands that write a document, and what must have run before.
COMMANDS = {
    QUANTIZE: "",
    "quantize model.onnx -o q.onnx --dynamic": "",
    "quantize model.onnx -o q.onnx --data data --recipe auto": "",
    "calibrate model.onnx -o ranges.json --data data": "",
    "explain model.onnx": "",
    "compare model.onnx q.onnx --data data": QUANTIZE,
    "analyze model.onnx q.onnx --data data": QUANTIZE,
    "convert model.onnx -o c.onnx --to float16": "",
    "list": "",
    "npu check model.onnx": "",
    "npu legalize model.onnx -o legal.onnx": "",
    "npu preflight model.onnx": "",
    "npu cut model.onnx -o first.onnx second.onnx --at c": "",
    "npu deploy model.onnx -o bundle --random-data 16 --min-sqnr 0": "",
}
COMMANDS["quantize model.onnx -o q.onnx --data data --accuracy 10dB"] = ""
if find_spec("optuna") is not None:
    COMMANDS["search model.onnx --data data --trials 2"] = ""
FAILURES = (
    "quantize absent.onnx -o q.onnx --dynamic",
    "explain",
    "quantise",
    "quantize model.onnx -o q.onnx --data data --min-sqnr 200",
)


def test_the_schema_itself_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def described(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the keys that a part of the schema describes."""
    if "$ref" in schema:
        yield from described(SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")])
    yield from schema.get("properties", {})
    for part in schema.get("allOf", ()):
        yield from described(part)


@pytest.mark.parametrize("command", COMMANDS)
def test_answers_are_described(cli: Any, command: str) -> None:
    """A document is valid, and the schema names each of its keys."""
    if COMMANDS[command]:
        assert cli(*COMMANDS[command].split()).code == 0
    document = cli(*command.split(), "--json").json
    VALIDATOR.validate(document)
    words = [document["command"], document.get("action")]
    part = SCHEMA["$defs"][" ".join(filter(None, words))]
    known = {*SCHEMA["properties"], *described(part)}
    assert set(document) <= known, "add new keys to answers.schema.json"


@pytest.mark.parametrize("command", FAILURES)
def test_failures_are_described(cli: Any, command: str) -> None:
    document = cli(*command.split(), "--json").json
    VALIDATOR.validate(document)
    assert document["error"]["message"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"schema": 2, "command": "list"},
        {"schema": 1, "command": "explain", "model": "m.onnx"},
        {"schema": 1, "command": "list", "presets": [{}]},
        {"schema": 1, "command": "npu", "action": "legalize", "notes": "none"},
        {"schema": 1, "command": "x", "error": {"kind": "E"}},
    ],
)
def test_wrong_documents_are_told_from_right_ones(wrong: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(wrong)


def test_every_command_has_a_part() -> None:
    from quark_onnx.cli.dispatch import build_parser

    _, parsers = build_parser()
    for name, parser in parsers.items():
        actions = [
            f"{name} {action}"
            for group in parser._actions
            for action in (group.choices if group.dest == "action" else ())
        ]
        assert set(actions or [name]) <= set(SCHEMA["$defs"])
