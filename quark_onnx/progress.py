"""A progress bar with an ETA on stderr, where a person is looking."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """Context manager around a tqdm bar.

    Args:
        show: True shows it, False does not, None shows it if stderr is a terminal. Without a stderr
            there is no bar.
        total: number of steps if it is known; without it the bar has no ETA.
    """

    def __init__(
        self,
        show: bool | None,
        total: int | None,
        name: str,
        unit: str,
    ) -> None:
        self._show = show
        self._total = total
        self._name = name
        self._unit = unit
        self._bar: Any = None

    def __enter__(self) -> Progress:
        from tqdm import tqdm

        disable: bool | None = None if self._show is None else not self._show
        if (
            sys.stderr is None
        ):  # as Python leaves it where the process was started without one
            disable = True
        self._bar = tqdm(
            total=self._total,
            desc=self._name,
            unit=self._unit,
            disable=disable,
            leave=False,
        )
        return self

    def update(self, done: int) -> None:
        """Set the number of steps that are done."""
        self._bar.update(done - self._bar.n)

    def __exit__(
        self,
        *error: type[BaseException] | BaseException | TracebackType | None,
    ) -> None:
        self._bar.close()
