"""Two samples are judged at the same time, unless a model is random."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx.engines import open_quantized
from quark_onnx.trials import judge
from tests.models import parse

PLAIN = "y = Neg (x)"
RANDOM = "r = RandomNormalLike <seed = 1.0> (x) y = Add (x, r)"


def model(nodes: str) -> ModelProto:
    return parse(f"g (float[N,4] x) => (float[N,4] y) {{ {nodes} }}")


class Meeting:
    """A session whose runs wait for a second one."""

    def __init__(self, session: Any, meeting: threading.Barrier) -> None:
        self._session, self._meeting = session, meeting

    def run(self, *arguments: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            self._meeting.wait(0.5)
        return self._session.run(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.mark.parametrize(
    ("before", "after", "together"),
    [(PLAIN, PLAIN, True), (RANDOM, PLAIN, False), (PLAIN, RANDOM, False)],
    ids=["deterministic", "random", "random other"],
)
def test_two_samples_at_a_time(
    before: str, after: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = threading.Barrier(2)

    def meet(*arguments: Any, **options: Any) -> Meeting:
        return Meeting(open_quantized(*arguments, **options), meeting)

    monkeypatch.setattr(judge, "open_quantized", meet)
    samples = [{"x": np.full((1, 4), value, np.float32)} for value in range(4)]
    judge.judge_models(model(before), model(after), samples, preprocessing=False)
    # A barrier that nobody else has reached in time is broken.
    assert meeting.broken is not together
