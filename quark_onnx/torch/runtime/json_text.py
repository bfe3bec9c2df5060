"""parse_json: read JSON that others have written."""

from __future__ import annotations

import json
from typing import Any

#: Upper bound of the depth of a JSON file; configurations have less than ten levels.
_NESTED = 100


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is no JSON, or its arrays and objects are nested too deeply.
    """
    nested = f"more than {_NESTED} arrays and objects are inside of each other"
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError(nested) from error
    # The parser's own limit depends on the stack, and writers of JSON have a lower one.
    level = [found]
    for _ in range(_NESTED):
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [
            each
            for value in inner
            for each in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise ValueError(nested)
    return found
