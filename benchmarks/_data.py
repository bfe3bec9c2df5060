"""The real tasks that the benchmarks measure on: found through QUARK_ONNX_DATA, handed on as sample
files.

The data is not part of the project (most of it may not be redistributed). QUARK_ONNX_DATA names a
folder whose `realdata.py` offers `load(name) -> Task(path, calibration, evaluate, metric,
float_value)`.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

Feeds = dict[str, np.ndarray[Any, np.dtype[Any]]]
VARIABLE = "QUARK_ONNX_DATA"


class Task(Protocol):
    """What `realdata.load` returns."""

    path: Path
    calibration: Callable[[int], Iterator[Feeds]]
    evaluate: Callable[[object], float]
    metric: str
    float_value: float


@runtime_checkable
class ScoredTask(Protocol):
    """A task whose metric is the mean over its test samples of a score."""

    def scores(self, session: Any) -> np.ndarray[Any, np.dtype[Any]]:
        """The score of each test sample, from 0 to 1."""


def root() -> Path:
    """The folder of models and data; leaves with a message when it is not there."""
    value = os.environ.get(VARIABLE)
    if not value or not Path(value, "realdata.py").is_file():
        found = (
            f"it is {value!r}, where there is no such file"
            if value
            else "it is not set"
        )
        sys.exit(
            "This benchmark measures real models on real data, which are not part of the project.\n"
            f"Set {VARIABLE} to the folder that holds realdata.py; now {found}."
        )
    return Path(value)


def load(name: str) -> Task:
    """The task called `name`, of a package or of the data folder; leaves with a message when that
    is not there.
    """
    from _packaged import TASKS

    if name in TASKS:
        return TASKS[name]()
    if (value := str(root())) not in sys.path:
        sys.path.append(value)
    return cast(Task, importlib.import_module("realdata").load(name))


def digest(path: Path) -> str:
    """Twelve hex digits that tell one version of a file from another."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


class Samples:
    """Calibration samples in a folder, one .npz file each, read anew whenever asked: one is alive
    at a time.

    With `count` above the number of files they repeat.
    """

    def __init__(self, folder: Path, count: int | None = None) -> None:
        self.files = sorted(folder.glob("*.npz"))
        self.count = len(self.files) if count is None else count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Feeds]:
        for file in islice(cycle(self.files), self.count):
            with np.load(file) as arrays:
                yield {name: arrays[name] for name in arrays.files}

    @staticmethod
    def write(samples: Iterator[Feeds], folder: Path) -> Samples:
        """Store samples as files that `Samples` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        for i, feeds in enumerate(samples):
            np.savez(folder / f"{i:04}.npz", allow_pickle=False, **feeds)
        return Samples(folder)


def session_of(model: Path) -> Any:
    """A session on the CPU, by which a metric judges a model, whoever has made it.

    Where sums of 8-bit products saturate it computes what other processors would.
    """
    from calibrators.onnx_runtime.session import open_session

    return open_session(model)


def evaluated(task: Task, file: Path, kept: Mapping[str, Any] | None) -> dict[str, Any]:
    """The metric of a quantized file, its digest, and the version of onnxruntime.

    The value is that of `kept` where this row of the same model and metric has the same digest and
    version.
    """
    import onnxruntime

    row: dict[str, Any] = {"file": digest(file), "runtime": onnxruntime.__version__}
    if kept and all(kept.get(name) == entry for name, entry in row.items()):
        row["value"] = kept["value"]
    else:
        row["value"] = round(float(task.evaluate(session_of(file))), 4)
    return row


def labels(name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """The class of each test image of a classification task, in the order in which its metric reads
    them.
    """
    vision = Path(os.environ[VARIABLE]) / "vision"
    if name.startswith("resnet"):
        with np.load(vision / "cifar10" / "cifar10_lossless.npz") as arrays:
            return np.asarray(arrays["test_y"])
    with (vision / "imagenet" / "labels.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        rows = list(csv.DictReader(file))
    return np.array([int(row["label"]) for index, row in enumerate(rows) if index % 10])
