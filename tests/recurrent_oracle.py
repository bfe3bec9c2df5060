"""Recurrent layers in float64, as ONNX defines them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.models import Array


def recurrent(kind: str) -> Callable[[Array, Array, Array], Array]:
    """LSTM, GRU or RNN without biases, as ONNX defines them; (T, directions, N, hidden)."""

    def sigmoid(values: Array) -> Array:
        return 1 / (1 + np.exp(-values))

    def compute(x: Array, w: Array, r: Array) -> Array:
        hidden = r.shape[2]
        result = np.zeros((len(x), len(w), x.shape[1], hidden))
        for direction in range(len(w)):
            state = cell = np.zeros((x.shape[1], hidden))
            steps = range(len(x))
            for step in reversed(steps) if direction else steps:
                gates = np.split(x[step] @ w[direction].T, len(w[0]) // hidden, 1)
                own = np.split(state @ r[direction].T, len(gates), 1)
                if kind == "RNN":
                    state = np.tanh(gates[0] + own[0])
                elif kind == "GRU":
                    z, reset = (
                        sigmoid(a + b) for a, b in zip(gates[:2], own[:2], strict=True)
                    )
                    new = np.tanh(
                        gates[2] + (reset * state) @ r[direction][2 * hidden :].T
                    )
                    state = (1 - z) * new + z * state
                else:
                    i, o, f, c = (a + b for a, b in zip(gates, own, strict=True))
                    cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(c)
                    state = sigmoid(o) * np.tanh(cell)
                result[step, direction] = state
        return result

    return compute
