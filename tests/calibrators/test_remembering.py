"""A session that remembers outputs: equal values, fewer runs, bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from calibrators.onnx_runtime.remembering import (
    RememberingSession,
    ReopenedSession,
    without_memory,
)
from calibrators.onnx_runtime.session import open_session
from tests.models import parse


class Counted:
    """A session on ``y = 2 x``, ``n = Shape (x)`` that counts its runs."""

    def __init__(self) -> None:
        self.runs = 0
        self._session = open_session(
            parse(
                "g (float[N] x) => (float y, int64 n) { y = Add (x, x) n = Shape (x) }"
            )
        )

    def run(self, names: Any, feeds: Mapping[str, Any]) -> Any:
        self.runs += 1
        return self._session.run(names, feeds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.fixture
def counted() -> Counted:
    return Counted()


def feeds(*values: float) -> dict[str, Any]:
    return {"x": np.array(values, np.float32)}


def test_equal_inputs_are_run_once(counted: Counted) -> None:
    session = RememberingSession(counted)
    first, size = session.run(None, feeds(1, 2))
    (again,) = session.run(["y"], feeds(1, 2))
    assert first.tolist() == again.tolist() == [2, 4]
    assert size.tolist() == [2]
    assert counted.runs == 1


def test_other_values_are_run(counted: Counted) -> None:
    session = RememberingSession(counted)
    array = np.array([1, 2], np.float32)
    session.run(None, {"x": array})
    array[1] = 5  # a reader may use one buffer for all samples
    assert session.run(["y"], {"x": array})[0].tolist() == [2, 10]
    assert session.run(["y"], feeds())[0].tolist() == []
    assert counted.runs == 3


def test_outputs_beyond_the_limit_are_computed_again(counted: Counted) -> None:
    session = RememberingSession(counted, limit=20)
    for _ in range(2):
        assert session.run(["y"], feeds(1, 2))[0].tolist() == [2, 4]
        assert session.run(["y"], feeds(3))[0].tolist() == [6]
    assert counted.runs == 3, "16 bytes fit, 12 more do not"


def test_outputs_computed_elsewhere(counted: Counted) -> None:
    session = RememberingSession(counted)
    known = {"y": np.array([7], np.float32), "n": np.array([1]), "other": None}
    session.remember(feeds(1) | {"unknown": np.zeros(3)}, known)
    assert session.run(["y"], feeds(1))[0].tolist() == [7]
    assert counted.runs == 0


def test_without_memory(counted: Counted) -> None:
    session = RememberingSession(counted)
    assert without_memory(session) is counted
    assert without_memory(counted) is counted


def test_a_failure_is_not_remembered(counted: Counted) -> None:
    session = RememberingSession(counted)
    for _ in range(2):
        with pytest.raises(Exception, match="Unexpected input data type"):
            session.run(None, {"x": np.zeros(2, np.int64)})
    assert counted.runs == 2


def test_a_released_session_is_opened_when_it_runs() -> None:
    opened = list[Counted]()

    def open_again() -> Counted:
        opened.append(Counted())
        return opened[-1]

    session = ReopenedSession(open_again)
    session.run(["y"], feeds(1.0))
    session.run(["y"], feeds(2.0))
    assert [each.runs for each in opened] == [2]
    session.release()
    assert [value.name for value in session.get_outputs()] == ["y", "n"]
    assert [value.name for value in session.get_inputs()] == ["x"]
    assert len(opened) == 1
    (y,) = session.run(["y"], feeds(3.0))
    assert y.tolist() == [6.0]
    assert [each.runs for each in opened] == [2, 1]
