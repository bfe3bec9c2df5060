"""journal: what was found for a layer, kept by what it was found from, so that an interrupted run goes on."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.errors import ConfigError
from quark_onnx.optimizers import LayerOptimizer
from quark_onnx.optimizers.problem import LayerResult, Problem, Solution

#: Changes whenever an optimizer computes something else from the same problem.
_VERSION = "1"


class Journal:
    """A folder of solutions, by the hash of the problem and of the optimizers; nothing without a folder."""

    def __init__(self, folder: Path | None, optimizers: Sequence[LayerOptimizer]) -> None:
        self._folder = folder
        self._settings = f"{_VERSION} {list(optimizers)!r}"
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"resume: {folder} cannot be used as a folder: {error.strerror}") from error

    def key(self, problem: Problem) -> str:
        """The hash of everything that a solution depends on; empty without a folder."""
        if self._folder is None:
            return ""
        digest = hashlib.blake2b(self._settings.encode(), digest_size=16)
        digest.update(f"{problem.name} {problem.biased} {problem.activation} {problem.seed}".encode())
        lattice = problem.lattice
        arrays: list[NDArray[Any]] = [
            problem.weight,
            problem.bias,
            problem.mean,
            lattice.scale,
            lattice.levels,
            lattice.least,
        ]
        arrays += [lattice.greatest]
        arrays += [part for rows in (problem.train, problem.held) for part in (rows.inputs, rows.targets)]
        for array in arrays:
            digest.update(f"{array.shape} {array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def find(self, key: str) -> tuple[Solution, LayerResult] | None:
        """What was kept under a key; None if there is nothing, or nothing that can be read."""
        if self._folder is None:
            return None
        try:
            with np.load(self._folder / f"{key}.npz", allow_pickle=False) as stored:
                result = LayerResult(**json.loads(str(stored["result"])))
                return Solution(stored["weight"], stored["bias"]), result
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
            return None

    def keep(self, key: str, solution: Solution, result: LayerResult) -> None:
        """Keep a solution; a run that is killed meanwhile leaves no half of it under its name."""
        if self._folder is None:
            return
        path = self._folder / f"{key}.npz"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            np.savez(file, weight=solution.weight, bias=solution.bias, result=json.dumps(asdict(result)))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
