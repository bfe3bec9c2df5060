"""JSON documents of results."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

#: Version of every JSON document. Keys are added within a version, never renamed.
SCHEMA = 1


def to_json(document: Mapping[str, Any]) -> str:
    """Return a JSON document in ASCII.

    Infinities become the strings "inf" and "-inf", NaN null, paths strings.

    Args:
        document: the values.

    >>> print(to_json({"worst_sqnr": math.inf}))
    {
      "schema": 1,
      "worst_sqnr": "inf"
    }
    """
    # allow_nan=False: an infinity that ``plain`` missed would be no valid JSON.
    return json.dumps(plain({"schema": SCHEMA, **document}), indent=2, allow_nan=False)


def preformatted(value: object) -> str:
    """Return the text of a value as a notebook shows it.

    >>> preformatted("a < b")
    '<pre>a &lt; b</pre>'
    """
    return f"<pre>{escape(str(value))}</pre>"


def plain(value: Any) -> Any:
    """Return a value of the types that JSON has, with the conversions of ``to_json``.

    >>> plain({"output": (1, math.nan, -math.inf)})
    {'output': [1, None, '-inf']}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float):
        return _plain_number(value)
    return value


def _plain_number(value: float) -> float | str | None:
    """Return a number that JSON has, "inf" or "-inf", or None for NaN."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)
