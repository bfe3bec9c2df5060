"""Warnings of repeated work, logged once."""

from __future__ import annotations

import logging
from types import TracebackType

_PACKAGES = ("quark_onnx", "calibrators")


class WarningsOnce(logging.Filter):
    """A context in which each warning of the package is logged once.

    It may be entered again; a warning of an earlier time counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first = dict[tuple[str, str], logging.LogRecord]()
        self._handlers = set[logging.Handler]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a warning that equals an earlier one."""
        if record.levelno < logging.WARNING or not record.name.startswith(_PACKAGES):
            return True
        # Each handler is asked about the same record.
        key = record.name, record.getMessage()
        return self._first.setdefault(key, record) is record

    def __enter__(self) -> None:
        # The filter of a logger does not see the records of loggers below it.
        loggers = [logging.getLogger(name) for name in ("", *_PACKAGES)]
        self._handlers = {each for logger in loggers for each in logger.handlers}
        if logging.lastResort is not None:
            self._handlers.add(logging.lastResort)
        for handler in self._handlers:
            handler.addFilter(self)

    def __exit__(
        self, *error: type[BaseException] | BaseException | TracebackType | None
    ) -> None:
        for handler in self._handlers:
            handler.removeFilter(self)
