"""Names of inputs, outputs and other named values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Named(Protocol):
    """Anything with a name: an input of a model, a tensor, a file."""

    @property
    def name(self) -> str:
        """The name."""


def names_of(values: Iterable[Named]) -> list[str]:
    """Return the names of values, in their order."""
    return [value.name for value in values]
