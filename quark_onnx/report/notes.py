"""Notes for the report; every stage of a run returns its notes with its result."""

from __future__ import annotations

from collections.abc import Iterable


class ResultNote(str):
    """A note that holds only for a quantized result, such as one on a rewrite of the float graph.

    It does not hold where the float model itself is the result.
    """


def of_float_model(notes: Iterable[str]) -> list[str]:
    """Return the notes that hold where the float model itself is the result.

    >>> of_float_model(["no data was read", ResultNote("fold_constants: 2")])
    ['no data was read']
    """
    return [note for note in notes if not isinstance(note, ResultNote)]
