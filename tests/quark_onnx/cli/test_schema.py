"""The published JSON schema describes what every command writes, key by key."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.answers import SCHEMA, check_described
from tests.quark_onnx.torch.validate import drafts

jsonschema = pytest.importorskip("jsonschema")

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
    "check model.onnx --target openvino": "",
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
    "quantize model.onnx -o q.onnx --data data --accuracy 500dB",
    "compare model.onnx model.onnx --data absent",
    "llm",
    "llm ptq data -o out",
    "llm ptq absent -o out --scheme fp8 --data data",
    "llm oga data -o out --scheme fp8",
    "llm gguf absent -o out.txt",
    "llm search data -o out --for vllm",
    "llm validate absent --for vllm",
)


def test_the_schema_itself_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("command", COMMANDS)
def test_answers_are_described(cli: Any, command: str) -> None:
    """A document is valid, and the schema names each of its keys."""
    if COMMANDS[command]:
        assert cli(*COMMANDS[command].split()).code == 0
    document = cli(*command.split(), "--json").json
    check_described(document)


@pytest.mark.parametrize(
    ("draft", "arguments", "code"),
    [("fp8", "", 0), ("nvfp4", "", 1), ("fp8", "--fix", 0), ("older", "--fix", 0)],
)
def test_verdicts_on_checkpoints_are_described(
    cli: Any, folder: Path, draft: str, arguments: str, code: int
) -> None:
    """Also such that would be refused or are repaired; ptq, search and gguf need torch."""
    written = drafts.quark(*([draft] if draft == "nvfp4" else []))
    if draft == "older":
        written.rename(".weight_scale", ".weight_quantizer.scale")
    written.write(folder / "llama")
    command = f"llm validate llama --for transformers {arguments} --json"
    finished = cli(*command.split())
    assert finished.code == code
    check_described(finished.json)
    assert ("output" in finished.json) == bool(arguments)


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
