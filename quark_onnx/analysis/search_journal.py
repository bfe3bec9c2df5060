"""SearchJournal: what a search has measured, a line of JSON for each candidate, so that an
interrupted one goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
from onnx import ModelProto

from calibrators.base import is_number
from calibrators.onnx_runtime.external_tensors import is_stored, values
from calibrators.onnx_runtime.session import initializers
from quark_onnx.config import QConfig, to_dict
from quark_onnx.errors import ConfigError

#: Changes whenever the lines do.
_FORMAT = 2
_TITLE = "quark_onnx_search"
#: What a journal belongs to, and how a message calls it.
_IDENTITY = {
    "format": "another version of journals",
    "version": "another version of this package",
    "model": "another model",
    "samples": "other data: the number of samples differs",
    "data": "other data: a sample differs",
    "score": "another metric",
}


@dataclass(frozen=True)
class Record:
    """What was measured of one configuration.

    Attributes:
        score: the higher the better; None if it failed.
        seconds: how long it took.
        bytes: the size of the quantized model; None if it failed.
        error: why it failed; empty if it did not.
    """

    score: float | None
    seconds: float
    bytes: int | None
    error: str = ""


class SearchJournal:
    """Records by the hash of their configuration, in a file where there is one.

    Args:
        path: the file, which is made if it does not exist; None for none.
        identity: what the records depend on besides the configuration; a file of something else is
            an error.

    Raises:
        ConfigError: the file is no journal, is damaged, belongs to something else, or cannot be
            written.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any]) -> None:
        self._path = path
        self._header = json.dumps({_TITLE: {"format": _FORMAT, **identity}})
        self._records: dict[str, Record] = {}
        if path is None:
            return
        with self._speaking(path):
            data = path.read_bytes() if path.exists() else b""
            whole = data[
                : data.rfind(b"\n") + 1
            ]  # a process that was killed leaves the beginning of a line
            if whole:
                self._read(path, whole)
            elif not self._header.encode().startswith(data):
                raise ConfigError(
                    f"journal {path} exists and is no journal of a search; it is not overwritten",
                )
            with path.open("ab") as file:
                file.truncate(len(whole))
            if not whole:
                self._append(path, self._header)

    def find(self, config: QConfig) -> Record | None:
        """What was measured of a configuration; None if it was not tried."""
        return self._records.get(config_key(config))

    def keep(self, name: str, config: QConfig, record: Record) -> None:
        """Add a record; it is on the disk when this returns."""
        key = config_key(config)
        self._records[key] = record
        if self._path is not None:
            fields = {name: _plain(value) for name, value in asdict(record).items()}
            line = {"key": key, "name": name, **fields, "config": to_dict(config)}
            with self._speaking(self._path):
                self._append(self._path, json.dumps(line, allow_nan=False))

    def _append(self, path: Path, line: str) -> None:
        with path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self, path: Path, data: bytes) -> None:
        first, *lines = data.splitlines()
        found = _parsed(first)
        header = found.get(_TITLE) if found is not None else None
        if not isinstance(header, dict):
            raise ConfigError(
                f"journal {path} exists and is no journal of a search; it is not overwritten",
            )
        mine = json.loads(self._header)[_TITLE]
        for name, words in _IDENTITY.items():
            if header.get(name) != mine.get(name):
                raise ConfigError(
                    f"journal {path} belongs to {words}; name another file, or remove this one",
                )
        for number, line in enumerate(lines, 2):
            entry = _parsed(line)
            try:
                key, record = _entry({} if entry is None else entry)
            except (KeyError, TypeError, ValueError, OverflowError):
                raise ConfigError(
                    f"journal {path}: line {number} is damaged; remove it to go on",
                ) from None
            self._records[key] = record

    @contextmanager
    def _speaking(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (
            OSError,
            ValueError,
        ) as error:  # a ValueError is a path that no file can have
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"journal {path} cannot be read and written: {reason}",
            ) from error


def config_key(config: QConfig) -> str:
    """The hash of a configuration, by its dictionary form."""
    text = json.dumps(to_dict(config), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def model_key(model: ModelProto) -> str:
    """The hash of a model's bytes, those in other files included."""
    digest = hashlib.blake2b(digest_size=16)
    graph = model.graph
    parts = [
        *model.opset_import,
        *model.functions,
        *graph.input,
        *graph.output,
        *graph.node,
    ]
    parts += graph.sparse_initializer
    parts += [tensor for tensor in graph.initializer if not is_stored(tensor)]
    for (
        part
    ) in parts:  # not the model as a whole, which may be larger than a message can be
        data = part.SerializeToString(deterministic=True)
        digest.update(f"{len(data)} ".encode())
        digest.update(data)
    for tensor in filter(is_stored, initializers(graph)):
        digest.update(f"{tensor.name} {tensor.data_type} {list(tensor.dims)} ".encode())
        digest.update(
            np.ascontiguousarray(values(tensor)).reshape(-1).view(np.uint8).data,
        )
    return digest.hexdigest()


def function_key(function: Callable[..., Any]) -> str:
    """What tells a function from others: its name, and its code where it is written in Python."""
    named = function if hasattr(function, "__qualname__") else type(function)
    code = getattr(function, "__code__", None) or getattr(
        type(function).__call__,
        "__code__",
        None,
    )
    digest = (
        hashlib.blake2b(_code_text(code).encode(), digest_size=8).hexdigest()
        if code is not None
        else ""
    )
    return f"{named.__module__}.{named.__qualname__} {digest}".strip()


def _code_text(code: CodeType) -> str:
    """What code does, whatever its file and line."""
    inner = [
        _code_text(each) if isinstance(each, CodeType) else repr(each)
        for each in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {inner}"


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (
        ValueError,
        RecursionError,
    ):  # a ValueError is also what bytes are that are no text
        return None
    return found if isinstance(found, dict) else None


def _entry(line: dict[str, Any]) -> tuple[str, Record]:
    score, size, error, seconds = (
        line["score"],
        line["bytes"],
        line["error"],
        line["seconds"],
    )
    if not isinstance(error, str) or (score is None) != bool(error):
        raise ValueError("neither a score nor an error, or both")
    if score is not None and (isinstance(score, bool) or np.isnan(float(score))):
        raise ValueError("the score is no number")
    if not is_number(seconds) or not 0 <= seconds < np.inf:
        raise ValueError("the seconds are no number")
    return str(line["key"]), Record(
        None if score is None else float(score),
        float(seconds),
        None if size is None else int(size),
        error,
    )


def _plain(value: Any) -> Any:
    """A value that JSON has; infinities are texts."""
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
