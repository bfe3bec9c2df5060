"""A pytest plugin: quantize with onnxruntime as well, whatever a test quantizes, and note the
accuracy of both.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxruntime.quantization as theirs

import quark_onnx.compat_onnxruntime as ours

#: Where the notes go, one JSON object a line: test, ours and theirs in decibels.
NOTES = "ORT_COMPARE_NOTES"
#: Decibels of outputs that do not differ, or in the last bits of a float alone.
_EXACT = 150.0
#: Rows of a batch; how many of them are drawn, and how many of a model whose inputs have few
#: values, which would say little.
_ROWS, _DRAWS, _MOST_DRAWS = 16, 8, 128
#: How many values of inputs are drawn, within these limits.
_VALUES = 8192
_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}


def pytest_configure(config: Any) -> None:
    """Let both calls be followed by onnxruntime's own, also where ``quantize`` makes them."""
    module = importlib.import_module("quark_onnx.compat_onnxruntime.quantize")
    for name in ("quantize_static", "quantize_dynamic"):
        both = _both(getattr(ours, name), getattr(theirs, name))
        setattr(ours, name, both)
        setattr(module, name, both)


def _both(own: Callable[..., None], their: Callable[..., None]) -> Callable[..., None]:
    def call(*arguments: Any, **keywords: Any) -> None:
        given = inspect.signature(their).bind(*arguments, **keywords).arguments
        readers: Iterator[Any] = itertools.repeat(given.get("calibration_data_reader"))
        samples = list[Any]()
        if hasattr(next(readers), "get_next"):
            *copies, last = _copies(next(readers))
            readers = iter(copies)
            samples = list(itertools.islice(iter(last.get_next, None), _MOST_DRAWS))
        own(**_with(given, next(readers)))
        with tempfile.TemporaryDirectory() as folder:
            other = str(Path(folder, "theirs.onnx"))
            try:
                their(**_with(given, next(readers)) | {"model_output": other})
                outputs = (given["model_output"], other)
                pair = [
                    _sqnr(given["model_input"], output, samples) for output in outputs
                ]
            except Exception:  # a test may ask for what onnxruntime does not run
                return
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        with Path(os.environ[NOTES]).open("a", encoding="utf-8") as notes:
            notes.write(
                json.dumps({"test": test, "ours": pair[0], "theirs": pair[1]}) + "\n"
            )

    return call


def _with(given: dict[str, Any], reader: Any) -> dict[str, Any]:
    """Arguments with another reader, where there is one."""
    if "calibration_data_reader" not in given:
        return dict(given)
    return {**given, "calibration_data_reader": reader}


def _copies(reader: Any) -> tuple[Any, Any, Any]:
    """A reader and two copies of what it holds; one that can start again is left as it is."""
    strided = getattr(type(reader), "set_range", None)
    base = theirs.CalibrationDataReader.set_range
    if hasattr(reader, "rewind") or strided not in (None, base):
        return reader, _Rewound(reader), _Rewound(reader)
    samples = []
    with contextlib.suppress(StopIteration):  # how some end
        while (sample := reader.get_next()) is not None:
            samples.append(sample)
    return _Replay(samples), _Replay(samples), _Replay(samples)


class _Replay(theirs.CalibrationDataReader):  # type: ignore[misc]
    """Samples one after another."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = iter(samples)

    def get_next(self) -> Any:
        return next(self._samples, None)


class _Rewound(theirs.CalibrationDataReader):  # type: ignore[misc]
    """A reader that starts again with the first sample that is asked for."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._started = False

    def get_next(self) -> Any:
        if not self._started and hasattr(self._reader, "rewind"):
            self._reader.rewind()
        self._started = True
        return self._reader.get_next()


def _sqnr(float_model: Any, quantized: Any, samples: Sequence[Any]) -> float:
    """Signal to noise of the worst output, a mean over inputs, in decibels.

    The inputs are those of the calibration, whose ranges the scales are for; without any, they
    are random.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = (
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    )
    source = (
        float_model.SerializeToString()
        if isinstance(float_model, onnx.ModelProto)
        else str(float_model)
    )
    before, after = (
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        for model in (source, str(quantized))
    )
    if samples:
        drawn = [_worst(before, after, sample) for sample in samples]
        return min(float(np.mean(drawn)), _EXACT)
    for free in (_ROWS, 1):
        try:
            count = _VALUES // _size(before, free)
            seeds = range(min(max(count, _DRAWS), _MOST_DRAWS))
            draws = [_draw(before, after, free, seed) for seed in seeds]
            return min(float(np.mean(draws)), _EXACT)
        except Exception as error:  # the model may be for one size of its open ones
            failed = error
    raise failed


def _shape(value: Any, free: int) -> list[int]:
    """Return the shape of an input, with a size for dimensions that the model leaves open."""
    return [
        size if isinstance(size, int) and size > 0 else free for size in value.shape
    ]


def _size(session: Any, free: int) -> int:
    """Return the number of values of all inputs."""
    return sum(math.prod(_shape(value, free)) for value in session.get_inputs()) or 1


def _draw(before: Any, after: Any, free: int, seed: int) -> float:
    """Signal to noise of the worst output on one random input, in decibels.

    Args:
        before, after: sessions of the float and the quantized model.
        free: the size of dimensions that the model leaves open.
        seed: of the input.
    """
    random = np.random.default_rng(seed)
    feeds = {}
    for value in before.get_inputs():
        shape = _shape(value, free)
        kind = _TYPES[value.type]
        drawn = random.uniform(-1, 1, shape)
        feeds[value.name] = drawn > 0 if kind is np.bool_ else drawn.astype(kind)
    return _worst(before, after, feeds)


def _worst(before: Any, after: Any, feeds: Any) -> float:
    """Signal to noise of the worst output on one input, in decibels."""
    worst = float("inf")
    for wanted, found in zip(
        before.run(None, feeds), after.run(None, feeds), strict=True
    ):
        signal, noise = (
            float(np.sum(v.astype(np.float64) ** 2)) for v in (wanted, wanted - found)
        )
        if noise > 0:
            worst = min(worst, 10 * np.log10(max(signal, 1e-30) / noise))
    return worst
