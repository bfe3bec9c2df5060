"""Learned rounding: gradients against finite differences, the same result on any number of cores,
and with torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from quark_onnx.common.errors import ConfigError
from quark_onnx.kernels import device as devices
from quark_onnx.kernels.device import Device, device_for
from quark_onnx.kernels.rounding import (
    Descent,
    OutputPart,
    Units,
    adaquant,
    adaround,
    in_parts,
)
from quark_onnx.kernels.threads import one_thread
from quark_onnx.optimizers import AdaQuant, AdaRound
from quark_onnx.patterns.activation import Activation

ACTIVATIONS = {
    "linear": Activation(),
    "relu": Activation("clip", low=0.0),
    "clip": Activation("clip", low=-0.5, high=1.5),
    "leaky": Activation("leaky", slope=0.1),
    "silu": Activation("silu"),
    "hardswish": Activation("hardswish"),
    "gelu": Activation("gelu"),
}


def layer(groups: int, outputs: int, inputs: int = 6, rows: int = 50) -> dict[str, Any]:
    random = np.random.default_rng(groups * 100 + outputs)
    draw = partial(random.normal, size=None)
    values = {
        "x": draw(size=(groups, rows, inputs)),
        "target": draw(size=(groups, rows, outputs)),
        "weight": draw(size=(groups, outputs, inputs)),
        "bias": draw(size=(groups, outputs)) * 0.3,
        "norm": random.uniform(0.5, 2, (groups, outputs)),
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


def part_of(
    given: dict[str, Any], activation: Activation, device: Device
) -> OutputPart:
    functions = (
        partial(f, xp=device.xp) for f in (activation.value, activation.derivative)
    )
    wanted = activation.value(given["target"])
    return OutputPart(given["x"], wanted, *functions, given["norm"]).on(device)


@pytest.mark.parametrize(
    "shape", [(1, 4), (3, 2), (5, 1)], ids=["whole", "grouped", "depthwise"]
)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_those_of_finite_differences(
    name: str, shape: tuple[int, int]
) -> None:
    activation, given = ACTIVATIONS[name], layer(*shape)
    exact = {key: value.astype(np.float64) for key, value in given.items()}
    now = slice(14, 28)  # the second step of 14 rows, of 50

    def loss(weight: np.ndarray, bias: np.ndarray) -> float:
        found = activation.value(
            exact["x"][:, now] @ weight.swapaxes(1, 2) + bias[:, None]
        )
        error = found - activation.value(exact["target"][:, now])
        return float((np.square(error) / exact["norm"][:, None]).sum() / 14)

    part = part_of(given, activation, Device())
    found, shift = part.gradient(given["weight"], given["bias"], 14, 1)
    share = part.share(14)
    found, shift = found * share[..., None], shift * share
    for what, gradient in (("weight", found), ("bias", shift)):
        for place in np.ndindex(*gradient.shape):
            ends = []
            for step in (-1e-6, 1e-6):
                moved = {key: exact[key].copy() for key in ("weight", "bias")}
                moved[what][place] += step
                ends.append(loss(moved["weight"], moved["bias"]))
            assert gradient[place] == pytest.approx(
                (ends[1] - ends[0]) / 2e-6, rel=2e-3, abs=2e-3
            )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives(name: str) -> None:
    activation = ACTIVATIONS[name]
    x = np.linspace(-5, 5, 998)  # which meets no corner
    slope = (activation.value(x + 1e-6) - activation.value(x - 1e-6)) / 2e-6
    np.testing.assert_allclose(
        np.broadcast_to(activation.derivative(x), x.shape), slope, atol=1e-5
    )


def rounded(
    given: dict[str, Any], activation: Activation, device: Device, levels: Any = ()
) -> list[np.ndarray]:
    """Rounding that both implementations learn, on one device."""
    part = part_of(given, activation, device)
    weight, bias, put = given["weight"], device.put(given["bias"]), device.put
    scale = np.full_like(weight, 0.25)
    below = np.floor(weight / scale) * scale
    up = adaround(
        part,
        *map(put, (below, scale, (weight - below) / scale)),
        bias,
        Descent(60, 20, 0.3),
        device.xp,
    )
    ends = np.full_like(weight, -8), np.full_like(weight, 7)
    units = Units(scale, *ends, np.asarray(levels, np.float32)).on(device)
    *_, found = adaquant(
        part, put(weight / scale), bias, units, Descent(60, 20, 0.01), 0.01, device.xp
    )
    return [device.get(value) for value in (up, *found)]


@pytest.mark.parametrize(
    "levels", [(), (-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6)], ids=["integers", "levels"]
)
@pytest.mark.parametrize("shape", [(1, 4), (5, 1)], ids=["whole", "depthwise"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_torch_finds_what_numpy_finds(
    name: str, shape: tuple[int, int], levels: Any
) -> None:
    torch = pytest.importorskip("torch")
    given = layer(*shape)
    up, weight, bias = rounded(given, ACTIVATIONS[name], Device(), levels)
    other = rounded(given, ACTIVATIONS[name], Device(torch, "cpu"), levels)
    assert weight.dtype == bias.dtype == other[1].dtype == other[2].dtype == np.float32
    assert (
        up == other[0]
    ).mean() >= 0.9  # a weight in the middle may fall to either side
    np.testing.assert_allclose(weight, other[1], atol=0.02)
    np.testing.assert_allclose(bias, other[2], atol=0.02)


def test_adaround_finds_nearly_the_best_of_all_ways_to_round() -> None:
    ranks = list[tuple[int, int]]()
    for seed in range(12):
        random = np.random.default_rng(seed)
        x = random.normal(size=(1, 400, 6)) @ random.normal(size=(6, 6))
        weight, step = random.normal(size=(1, 1, 6)), 0.5
        below = np.floor(weight / step) * step
        share = (weight - below) / step
        every = (np.arange(64)[:, None] >> np.arange(6)) & 1
        losses = np.square(x[0] @ (below + step * every - weight)[0].T).mean(axis=0)
        nearest = losses[int((np.rint(share)[0, 0].astype(int) << np.arange(6)).sum())]
        given = {
            "x": x,
            "target": x @ weight.swapaxes(1, 2),
            "norm": np.full((1, 1), nearest),
        }
        part = part_of(
            {key: value.astype(np.float32) for key, value in given.items()},
            Activation(),
            Device(),
        )
        low, span, start = (
            v.astype(np.float32) for v in (below, np.full_like(below, step), share)
        )
        up = adaround(
            part,
            low,
            span,
            start,
            np.zeros((1, 1), np.float32),
            Descent(500, 256, 0.3, 0.1, push=0.5),
        )
        found = losses[int((up[0, 0].astype(int) << np.arange(6)).sum())]
        ranks.append((int((losses < found).sum()), int((losses < nearest).sum())))
    learned, plain = np.mean(ranks, axis=0)
    assert learned < 1.5 and plain > 8  # of 64


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "sizes", [(1, 700, 300), (300, 1, 9), (40, 8, 100), (1, 3, 100_000)], ids=str
)
def test_parts_cover_everything_once(sizes: tuple[int, int, int], threads: int) -> None:
    seen = np.zeros(sizes[:2], int)

    def work(groups: slice, outputs: slice) -> None:
        seen[groups, outputs] += 1

    for whole in (False, True):
        in_parts(work, *sizes, threads=threads, whole=whole)
    assert (seen == 2).all()


LEARN = """
import hashlib
import numpy as np
from quark_onnx.kernels.levels import Levels
from quark_onnx.optimizers import AdaQuant, AdaRound
from quark_onnx.patterns.activation import Activation
from quark_onnx.optimizers.problem import RoundingProblem, SampledRows
random = np.random.default_rng(0)
digest = hashlib.sha256()
for shape in ((1, 300, 300), (200, 1, 9)):
    groups, outputs, inputs = shape
    weight, bias = random.normal(size=shape), random.normal(size=shape[:2])
    x = random.normal(size=(groups, 300, inputs)).astype(np.float32)
    rows = SampledRows(x, (x @ weight.swapaxes(1, 2) + bias[:, None]).astype(np.float32))
    ends = [np.full(shape, value, np.float32) for value in (0.3, -8, 7)]
    lattice = Levels(ends[0], np.zeros(0, np.float32), *ends[1:])
    problem = RoundingProblem("n", weight, bias, lattice, True, Activation("clip", low=0.0), rows, rows, lambda: bias, None)
    for optimizer in (AdaRound(iterations=8, device="cpu"), AdaQuant(iterations=8, device="cpu")):
        found = optimizer(problem, problem.nearest())
        digest.update(found.weight.tobytes() + found.bias.tobytes())
print(digest.hexdigest())
"""  # noqa: E501


def test_the_result_does_not_depend_on_the_number_of_cores() -> None:
    root = str(Path(__file__).parents[3])
    found = set()
    for threads in ("1", "2"):
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment = {
            **os.environ,
            **dict.fromkeys(names, threads),
            "PYTHONPATH": root,
        }
        alone = (
            ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
            if threads == "1" and sys.platform == "linux"
            else []
        )
        command = [*alone, sys.executable, "-c", LEARN]
        found.add(
            subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            ).stdout
        )
    assert len(found) == 1


# Devices


def test_without_a_gpu_there_is_numpy_and_a_gpu_by_name_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "sees_gpu", lambda: False)
    assert device_for("auto") == device_for("cpu") == Device()
    for optimizer in (AdaRound, AdaQuant):
        with pytest.raises(
            ConfigError, match=f"device of {optimizer.name} is 'cuda'.*no GPU"
        ):
            optimizer(device="cuda")
        with pytest.raises(
            ConfigError, match=f"device of {optimizer.name} is 'tpu'.*auto, cpu, cuda"
        ):
            optimizer(device="tpu")


def cores() -> int:
    """On how many a product is computed."""
    return max(
        int(row["num_threads"])
        for row in threadpool_info()
        if row["user_api"] == "blas"
    )


def test_products_are_limited_until_the_last_one_closes() -> None:
    opened, closed, seen = threading.Event(), threading.Event(), list[int]()

    def second() -> None:
        with one_thread():
            opened.set()
            closed.wait(300)
            seen.append(cores())

    with threadpool_limits(2, "blas"):
        if cores() != 2:
            pytest.skip("numpy has a library of one thread")
        other = threading.Thread(target=second)
        with one_thread():
            other.start()
            assert opened.wait(300)
            with pytest.raises(ValueError, match="in it"), one_thread():
                raise ValueError("in it")
            assert cores() == 1
        closed.set()
        other.join()
        assert (seen, cores()) == ([1], 2)


def test_products_are_limited_beside_a_limit_of_another_thread() -> None:
    seen = list[int]()

    def beside() -> None:
        with one_thread():
            seen.append(cores())

    with threadpool_limits(2, "blas"):
        if cores() != 2:
            pytest.skip("numpy has a library of one thread")
        other = threading.Thread(target=beside)
        other.start()
        other.join()
        assert (seen, cores()) == ([1], 2)


def test_a_gpu_that_torch_sees_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(devices, "sees_gpu", lambda: True)
    monkeypatch.setattr(devices, "has_driver", lambda: True)
    assert device_for("auto") == device_for("cuda") == Device(torch, "cuda")
    assert device_for("cpu") == Device()
    assert (
        Device(torch, "cuda").parallel
        and not Device(torch, "cpu").parallel
        and not Device().parallel
    )


def test_auto_does_not_load_torch_where_there_is_no_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "has_driver", lambda: False)
    monkeypatch.setattr(
        devices, "sees_gpu", lambda: pytest.fail("torch is not to be asked")
    )
    assert device_for("auto") == Device()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"iterations": 0}, "iterations"),
        ({"iterations": 1.5}, "iterations"),
        ({"rows": True}, "rows"),
        ({"rate": "fast"}, "rate"),
        ({"rate": -1}, "rate"),
        ({"rate": float("nan")}, "rate"),
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", [AdaRound, AdaQuant])
def test_bad_settings(optimizer: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message} of {optimizer.name} is"):
        optimizer(**settings)
    for own, value in {AdaRound: ("warm", 2), AdaQuant: ("bias_rate", -1)}.items():
        with pytest.raises(ConfigError, match=f"{value[0]} of {own.name}"):
            own(**dict([value]))
