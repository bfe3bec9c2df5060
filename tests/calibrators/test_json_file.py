"""One reader of JSON: damage is one error, of the caller's class, that names the file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from calibrators.json_file import MOST_LEVELS, parse_json

ROOT = Path(__file__).parents[2]


class WrongFileError(Exception):
    """The error of a caller."""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "f.json is no JSON: line 1, column 2"),
        (b"\xff\xff", "f.json: the document is no JSON"),
        ("1" * 5000, "f.json: the document is no JSON"),
        ("[" * 100_000, "f.json: the document is nested too deeply: more than 100"),
        # within the limit of Python's parser
        ("[" * 101 + "]" * 101, "f.json: the document is nested too deeply"),
        ('{"a": ' * 101 + "0" + "}" * 101, "f.json: the document is nested too deeply"),
    ],
    ids=["cut", "bytes", "digits", "stack", "arrays", "objects"],
)
def test_damage_is_one_error(text: str | bytes, found: str) -> None:
    with pytest.raises(WrongFileError, match=re.escape(found)):
        parse_json(text, "f.json", WrongFileError)


def test_documents_up_to_the_limit() -> None:
    text = "[" * MOST_LEVELS + "]" * MOST_LEVELS
    assert parse_json(text, "f.json", WrongFileError).array()


def test_equal_keys() -> None:
    text = '{"a": {"b": 1, "b": 2}}'
    assert parse_json(text, "f.json", WrongFileError).value == {"a": {"b": 2}}
    with pytest.raises(WrongFileError, match="the key 'b' is there twice"):
        parse_json(text, "f.json", WrongFileError, unique=True)


def test_checkpoints_have_no_other_reader() -> None:
    """A second reader would have other limits and messages."""
    for path in (ROOT / "quark_onnx/torch").rglob("*.py"):
        assert not re.search(r"json\.loads?\(", path.read_text(encoding="utf-8")), path
