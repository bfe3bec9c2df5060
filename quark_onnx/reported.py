"""Reported: the common base of results, with a text for people and a document for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibrators.shown import printable

#: Version of every JSON document. Keys are added within a version, never renamed.
SCHEMA = 1


class Reported:
    """A result that prints as lines and converts to JSON.

    Pages (``write_page``) and the command line are made from the same two methods.
    """

    def lines(self) -> list[str]:
        """Return the result as lines of text; a verdict, if there is one, comes last."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values; numbers may be infinite."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return the result as a JSON document."""
        return to_json(self.to_dict())

    def __str__(self) -> str:
        return "\n".join(map(printable, self.lines()))


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
    return json.dumps(_plain({"schema": SCHEMA, **document}), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Path) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        return str(value)
    return value
