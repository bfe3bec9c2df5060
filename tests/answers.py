"""Documents of commands held against the published schema."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest


def check_described(document: dict[str, Any], part: str) -> None:
    """A document is valid, and its part of the schema names each of its keys."""
    jsonschema = pytest.importorskip("jsonschema")
    text = (files("quark_onnx.cli") / "answers.schema.json").read_text(encoding="utf-8")
    schema = json.loads(text)
    jsonschema.Draft202012Validator(schema).validate(document)
    own = schema["$defs"][part]["properties"]
    assert set(document) <= {*schema["properties"], *own}
