"""Journal of solved layers, from which an interrupted run resumes.

A solution is stored under a hash of its problem.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.common.resume_folder import ResumeFolder
from quark_onnx.optimizers import LayerOptimizer, Samples
from quark_onnx.optimizers.problem import LayerResult, RoundingProblem, Solution
from quark_onnx.running.run import sample_key

#: Increment whenever an optimizer's result for a given problem changes.
_VERSION = "4"


class Journal:
    """A folder of solutions by the hash of problem, optimizers and data.

    Without a folder, the journal is empty.
    """

    def __init__(
        self,
        folder: Path | None,
        optimizers: Sequence[LayerOptimizer],
        samples: Samples,
    ) -> None:
        """Open the folder of a journal.

        Args:
            folder: the folder, created if it does not exist; None for no journal.
            optimizers: the optimizers, whose settings are a part of every key.
            samples: the calibration samples, hashed at the first key.

        Raises:
            ConfigError: the folder cannot be created or written to.
        """
        self._is_kept = folder is not None
        self._samples = samples
        self._results = ResumeFolder(folder)
        # Optimizers are dataclasses, whose repr has all settings.
        self._settings = f"{_VERSION} {list(optimizers)!r}"
        self._reads_mean = any(optimizer.reads_mean for optimizer in optimizers)
        self._results.open()

    def key(self, problem: RoundingProblem) -> str:
        """Return the hash of a solution's dependencies; empty without a folder.

        Args:
            problem: the problem; its mean is computed only if an optimizer reads means.

        Returns:
            32 hexadecimal digits.
        """
        if not self._is_kept:
            return ""
        digest = hashlib.blake2b(
            f"{self._settings} {self._data}".encode(), digest_size=16
        )
        digest.update(
            f"{problem.name} {problem.biased} {problem.activation} {problem.seed}"
            f" {problem.scalable}".encode(),
        )
        lattice = problem.lattice
        arrays: list[NDArray[Any]] = [
            problem.weight,
            problem.bias,
            *([problem.mean()] if self._reads_mean else []),
            lattice.scale,
            lattice.levels,
            lattice.least,
            lattice.greatest,
        ]
        if problem.bias_lattice is not None:
            arrays += [
                problem.bias_lattice.scale,
                problem.bias_lattice.least,
                problem.bias_lattice.greatest,
            ]
        for rows in (problem.train, problem.held):
            arrays += [rows.inputs, rows.targets]
        for array in arrays:
            # Shapes are hashed, too: equal bytes may be different arrays.
            digest.update(f"{array.shape} {array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @cached_property
    def _data(self) -> str:
        """Return the hash of the samples, as optimizers may read more than the rows."""
        key = ""
        for sample in self._samples:
            # Chained, so that the order of the samples counts.
            key = sample_key(sample, key)
        return key

    def find(
        self, key: str, problem: RoundingProblem
    ) -> tuple[Solution, LayerResult] | None:
        """Return the stored solution of a problem.

        Args:
            key: the key of the problem.
            problem: the problem, whose shapes the solution must have.

        Returns:
            Solution and result of the layer; None if no readable solution is stored.
        """

        def load(path: Path) -> tuple[Solution, LayerResult]:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                result = LayerResult(**json.loads(str(stored["result"])))
                solution = Solution(
                    stored["weight"],
                    stored["bias"],
                    stored["factor"] if problem.scalable else None,
                )
            fits = (
                solution.weight.shape == problem.weight.shape
                and solution.bias.shape == problem.bias.shape
            )
            is_float = solution.weight.dtype == solution.bias.dtype == np.float32
            if not (fits and is_float):
                raise ValueError("it belongs to another problem, or was edited")
            return solution, result

        return self._results.read(f"{key}.npz", load)

    def keep(self, key: str, solution: Solution, result: LayerResult) -> None:
        """Store a solution atomically; a failure is logged, not raised.

        Args:
            key: the key of the problem.
            solution: the best solution.
            result: its losses, stored for the report.
        """
        self._results.keep(
            f"{key}.npz",
            lambda path: np.savez(
                path,
                weight=solution.weight,
                bias=solution.bias,
                factor=solution.factors,
                result=json.dumps(asdict(result)),
            ),
        )
