"""Single runs of a model, and the comparison of outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from calibrators.errors import UnknownOperator
from calibrators.onnx_runtime.external_tensors import is_held, is_on_disk
from calibrators.onnx_runtime.remembering import RememberingSession, ReopenedSession
from calibrators.onnx_runtime.session import open_session, outputs_of
from calibrators.onnx_runtime.worker import Session
from quark_onnx.common.errors import ModelError, RunError, UnknownOperatorError
from quark_onnx.graph.random_operators import may_be_random
from quark_onnx.running.function_bodies import with_bodies

Sample = Mapping[str, NDArray[Any]]

#: Maximum relative deviation (L2) of a float output after a rewrite, caused by float rounding.
TOLERANCE = 1e-4


class Reference:
    """The original float model, the reference of every comparison.

    The outputs of a sample are computed once.
    """

    def __init__(
        self,
        model: ModelProto,
        path: Path | None = None,
        *,
        optimize: bool = True,
        what: str = "the float model",
    ) -> None:
        """Remember the model; the session is opened on first use.

        Args:
            model: the float model.
            path: the file that ``model`` was read from; None if none.
            optimize: as in ``open_session``.
            what: as in ``open_session``.
        """
        self.model = model
        self._path = path
        self._optimize = optimize
        self._what = what
        self._lean = False

    def save_memory(self, *, optimize: bool) -> None:
        """Leave weights in their arrays, instead of packing them for many fast runs.

        Called before the session is opened.
        """
        self._lean = True
        self._optimize = optimize

    @cached_property
    def session(self) -> ReopenedSession:
        return ReopenedSession(self._opened)

    @cached_property
    def unknown_operator(self) -> str:
        """Why onnxruntime lacks an operator of the model; empty if the model loads.

        Raises:
            ModelError: the model does not load for another reason.
        """
        try:
            self.session  # noqa: B018  (whether it opens is the question)
        except UnknownOperatorError as error:
            return str(error)
        return ""

    def release(self) -> None:
        """Free the memory of the session, which is opened again when an output is unknown."""
        if "session" in self.__dict__:
            self.session.release()

    def _opened(self) -> Any:
        tensors = self.model.graph.initializer
        # Weights that were left in a file are mapped, not packed into further memory.
        lean = self._lean or any(map(is_on_disk, tensors))
        # sessions share held tensors, and would read a file into memory of their own
        shared = any(map(is_held, tensors))
        return _open(
            self.model if shared else self._path or self.model,
            self.model,
            self._what,
            lean=lean,
            optimize=self._optimize,
        )

    @cached_property
    def remembering(self) -> RememberingSession:
        """The session, with the outputs of earlier samples."""
        return RememberingSession(self.session, may_be_random=may_be_random(self.model))

    def outputs(self, sample: Sample) -> dict[str, Any]:
        """Return the outputs on a sample, by name.

        Raises:
            ModelError: onnxruntime cannot load or run the model.
        """
        return _run(self.remembering, sample)

    def outputs_once(self, sample: Sample) -> dict[str, Any]:
        """Return the outputs on a sample without keeping them.

        Raises:
            ModelError: onnxruntime cannot load or run the model.
        """
        return _run(self.session, sample)

    def repeatable(self, sample: Sample) -> dict[str, Any]:
        """Return the deterministic outputs.

        Args:
            sample: the sample, on which the model runs once more than for ``outputs``.

        Returns:
            The outputs by name that agree in two runs.
        """
        first, second = self.outputs(sample), _run(self.session, sample)
        return {
            name: value for name, value in first.items() if agree(value, second[name])
        }


def run(model: ModelProto, sample: Sample) -> dict[str, Any]:
    """Return the outputs of ``model`` on a sample, by name.

    Raises:
        ModelError: onnxruntime cannot load or run the model.
    """
    return _run(_open(model, model, "a rewritten model"), sample)


def _open(
    source: ModelProto | Path,
    model: ModelProto,
    what: str,
    *,
    lean: bool = False,
    optimize: bool = True,
) -> Any:
    """Open a session on a model, with function bodies for vendors' operators.

    Args:
        source: the model or its file, loaded if the model lacks no body.
        what: as in ``open_session``.
        lean: as in ``open_session``.
        optimize: as in ``open_session``.

    Raises:
        UnknownOperatorError: onnxruntime lacks a custom operator of the model.
        ModelError: onnxruntime cannot load the model; the message names nodes.
    """
    whole = with_bodies(model)
    try:
        return open_session(
            source if whole is model else whole, lean=lean, optimize=optimize, what=what
        )
    except Exception as error:  # onnxruntime raises several unrelated types
        # An unknown operator is the translation of a message of onnxruntime.
        where = _nodes_in_message(model, f"{error} {error.__cause__}")
        kind = (
            UnknownOperatorError if isinstance(error, UnknownOperator) else ModelError
        )
        raise kind(f"onnxruntime cannot load the model: {error}{where}") from error


def _nodes_in_message(model: ModelProto, message: str) -> str:
    """Return a node of each operator that a message of onnxruntime names, in words.

    The words follow a message; they are empty if it names no operator of the model.

    Args:
        message: the error message, with operators as "domain:type(version)".
    """
    named = dict[str, NodeProto]()
    # The first node of an operator remains.
    for node in reversed(model.graph.node):
        if f"{node.domain}:{node.op_type}(" in message:
            named[node.op_type] = node
    words = ""
    for node in named.values():
        name = node.name or next(iter(node.output), "")
        words += f" (node {name!r})"
    return words


def _run(session: Session, sample: Sample) -> dict[str, Any]:
    try:
        return outputs_of(session, sample)
    except Exception as error:
        raise RunError(f"onnxruntime cannot run the model: {error}") from error


def sample_key(sample: Mapping[str, Any], before: str = "") -> str:
    """Return the hash of a sample, chained to the hash of earlier samples.

    Args:
        sample: arrays, strings, sequences or maps by input name; the order of names is ignored.
        before: the hash of the earlier samples; empty for the first one.
    """
    digest = hashlib.blake2b(before.encode(), digest_size=16)
    # Independent of the order in which a reader names the inputs.
    for name in sorted(sample):
        value = sample[name]
        digest.update(f"{name} ".encode())
        if isinstance(value, np.ndarray) and value.dtype != object:
            digest.update(f"{value.shape} {value.dtype} ".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        else:  # strings, sequences and maps
            plain = value.tolist() if isinstance(value, np.ndarray) else value
            digest.update(repr(plain).encode())
    return digest.hexdigest()


def agree(first: Any, second: Any) -> bool:
    """Return whether two values of an output differ at most by float rounding.

    Args:
        first: the expected value: an array, a list or dictionary of values, or None.
        second: the other value.
    """
    if first is None or second is None:
        return first is second
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            agree(value, second[key]) for key, value in first.items()
        )
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(agree, first, second))
    return _arrays_agree(np.asarray(first), np.asarray(second))


def _arrays_agree(first: NDArray[Any], second: NDArray[Any]) -> bool:
    """Return whether two arrays have equal shapes and types, and values equal up to rounding."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    # Strings and bfloat16, for example, have no NaN that numpy could compare.
    if first.dtype.kind != "f":
        return bool(np.array_equal(first, second))
    # A norm with NaN or infinity would compare nothing.
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return bool(np.array_equal(first, second, equal_nan=True))
    reference = first.astype(np.float64)
    error = np.linalg.norm(reference - second.astype(np.float64))
    return bool(error <= TOLERANCE * np.linalg.norm(reference) + 1e-12)
