"""Documents of commands held against the published schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

SCHEMA: dict[str, Any] = json.loads(
    (files("quark_onnx.cli") / "answers.schema.json").read_text(encoding="utf-8")
)


def described(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the keys that a part of the schema describes."""
    if "$ref" in schema:
        yield from described(SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")])
    yield from schema.get("properties", {})
    for part in schema.get("allOf", ()):
        yield from described(part)


def check_described(document: dict[str, Any]) -> None:
    """A document is valid, and its part of the schema names each of its keys."""
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    words = [document["command"], document.get("action")]
    part = SCHEMA["$defs"][" ".join(filter(None, words))]
    known = {*SCHEMA["properties"], *described(part)}
    assert set(document) <= known, "add new keys to answers.schema.json"
