"""A session that computes the outputs of a sample once, and one that is opened as it is needed.

Several steps compare models with the float model on the same few samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np

from calibrators.names import names_of
from calibrators.onnx_runtime.external_tensors import raw_bytes
from calibrators.onnx_runtime.worker import Session, Value, interface

#: Default limit of the remembered outputs, in bytes; further samples are run again.
_BYTES = 1 << 26


class RememberingSession:
    """A session that returns remembered outputs for inputs it has seen.

    Inputs are recognized by their values, because a sample that is read again is another object.
    The outputs must not be changed.

    Attributes:
        session: the session that runs the model, without memory.
        may_be_random: whether outputs may differ from run to run.
    """

    def __init__(
        self, session: Any, limit: int = _BYTES, *, may_be_random: bool = True
    ) -> None:
        """Start without outputs.

        Args:
            session: the session to run.
            limit: maximum size of the remembered outputs, in bytes.
            may_be_random: whether the model may have random operators.
        """
        self.session = session
        self.may_be_random = may_be_random
        self._room = limit
        self._inputs = set(names_of(session.get_inputs()))
        self._names = names_of(session.get_outputs())
        self._known: dict[bytes, dict[str, Any]] = {}

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Return the outputs, computed only for new inputs."""
        # All outputs are computed at once, as the next call may want others of the same sample.
        wanted = self._names if names is None else names
        key = self._key(feeds)
        known = self._known.get(key) if key else None
        if known is None:
            values = self.session.run(self._names, feeds)
            known = dict(zip(self._names, values, strict=True))
            self._keep(key, known)
        return [known[name] for name in wanted]

    def remember(self, feeds: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Store outputs that were computed elsewhere.

        Args:
            feeds: the inputs; more than those of the model are ignored.
            outputs: the value of every output.
        """
        self._keep(self._key(feeds), {name: outputs[name] for name in self._names})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def _keep(self, key: bytes, outputs: dict[str, Any]) -> None:
        size = _size(outputs)
        if not key or size is None or size > self._room or key in self._known:
            return
        self._known[key] = outputs
        self._room -= size

    def _key(self, feeds: Mapping[str, Any]) -> bytes:
        """Return a hash of the inputs; empty if a value is no array of numbers."""
        state = hashlib.blake2b(digest_size=16)
        for name in sorted(self._inputs.intersection(feeds)):
            value = feeds[name]
            if not isinstance(value, np.ndarray) or value.dtype.hasobject:
                return b""
            # Type and shape are hashed too: equal bytes can be different arrays.
            state.update(repr((name, value.dtype.str, value.shape)).encode())
            state.update(raw_bytes(value))
        return state.digest()


class ReopenedSession:
    """A session that can be closed between runs, as it takes twice the memory of its weights."""

    def __init__(self, open_again: Callable[[], Any]) -> None:
        """Open the session.

        Args:
            open_again: opens the session; called again after ``release``.
        """
        self._open = open_again
        self._lock = Lock()
        self._session: Any = open_again()
        # onnxruntime's own values would keep the session alive.
        self._inputs, self._outputs = interface(self._session)

    def get_inputs(self) -> list[Value]:
        """Return the inputs of the model."""
        return self._inputs

    def get_outputs(self) -> list[Value]:
        """Return the outputs of the model."""
        return self._outputs

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> Any:
        """Compute outputs, after opening the session again if need be."""
        return self._opened().run(names, feeds)

    def release(self) -> None:
        """Close the session until the next run."""
        self._session = None

    def _opened(self) -> Any:
        # Runs in several lanes would open several sessions.
        with self._lock:
            if self._session is None:
                self._session = self._open()
            return self._session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened(), name)


def may_be_random(session: Session) -> bool:
    """Return whether outputs of a session may differ from run to run."""
    return not isinstance(session, RememberingSession) or session.may_be_random


def without_memory(session: Session) -> Session:
    """Return a session that computes every run."""
    return session.session if isinstance(session, RememberingSession) else session


def _size(outputs: Mapping[str, Any]) -> int | None:
    """Return the size of outputs in bytes; None for a value that is no array of numbers."""
    total = 0
    for value in outputs.values():
        if not isinstance(value, np.ndarray) or value.dtype.hasobject:
            return None
        total += value.nbytes
    return total
