"""Models that make onnxruntime crash, or run without an end, and a way to end such a run."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
import pytest

from calibrators import CalibrationError
from calibrators.onnx_runtime.isolation import IsolatedSession
from tests.models import parse, weight


def captured_mover(*, quantized: bool) -> onnx.ModelProto:
    """``Conv -> Transpose -> If``, whose branches capture the result of the Transpose.

    Quantized, only a DequantizeLinear stands before the Transpose, and nothing after it:
    onnxruntime 1.32 ends the process with SIGABRT when its QDQ propagation, which is on by default,
    moves the pair to the other side.
    """
    pair = "q = QuantizeLinear (c, scale, zero) d = DequantizeLinear (q, scale, zero)"
    return parse(
        f"""g (float[1, 3, 8, 8] x, bool cond) => (float y) {{
            c = Conv <pads = [1, 1, 1, 1]> (x, w)
            {pair if quantized else ""}
            [move] t = Transpose <perm = [0, 2, 3, 1]> ({"d" if quantized else "c"})
            [choose] y = If (cond) <
                then_branch = then () => (float a) {{ s = Sigmoid (t) a = ReduceSum <keepdims = 0> (s) }},
                else_branch = other () => (float b) {{ u = Tanh (t) b = ReduceSum <keepdims = 0> (u) }}
            >
        }}""",  # noqa: E501
        opset=16,
        w=weight(4, 3, 3, 3),
        scale=np.float32(0.05),
        zero=np.uint8(128),
    )


def endless(*, conditional: bool = False) -> onnx.ModelProto:
    """A product, and a Loop without count and condition.

    ``conditional``: the Loop ends after the first step if the sum of the input is positive.
    """
    go = (
        "go = ReduceSum <keepdims = 0> (x) small = LessOrEqual (go, none)"
        if conditional
        else ""
    )
    return parse(
        f"""g (float[1, 4] x) => (float[1, 4] y) {{
            {go}
            h = MatMul (x, w)
            y = Loop (, , h) <
                body = b (int64 i, bool before, float[1, 4] v) => (bool again, float[1, 4] next) {{
                    again = {"Identity (small)" if conditional else "Equal (i, i)"}
                    next = Add (v, tiny)
                }}
            >
        }}""",
        w=weight(4, 4),
        tiny=np.float32([1e-6]),
        none=np.float32(0),
    )


def crashing_inference(batch_dims: int = -(2**31)) -> onnx.ModelProto:
    """A product behind GatherND, at which onnx 1.23 infers shapes from memory that is not its own.

    Without the check of attributes' ranges (``graph.fields``), the process ends with SIGSEGV.
    """
    return parse(
        f"""g (float[2, 4] x) => (float[a, b] y) {{
            [gather] h = GatherND <batch_dims = {batch_dims}> (x, places)
            [product] y = MatMul (h, w)
        }}""",
        w=weight(4, 4),
        places=np.int64([[0], [1]]),
    )


def kill_runs_of(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the isolated process half a second after each run of one model has begun.

    A timer that starts with the test is not enough: on a busy machine it fires before the run does,
    and a killed process is started again, which nothing would end. For the same reason the process
    is killed again until the run has ended.

    Args:
        what: the model, as errors name it: "the float model".
        monkeypatch: of the test.
    """
    usual = IsolatedSession.run

    def run(session: IsolatedSession, *arguments: Any) -> Any:
        if session.what != what:
            return usual(session, *arguments)
        ended = threading.Event()

        def kill() -> None:
            while not ended.wait(0.5):
                with suppress(CalibrationError, ProcessLookupError):
                    os.kill(session.open().number, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            return usual(session, *arguments)
        finally:
            ended.set()
            killer.join()

    monkeypatch.setattr(IsolatedSession, "run", run)
