"""Runs of one model with several configurations: the trials of searches and of advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, TypeVar

from onnx import ModelProto

from calibrators.readers.spool import MEMORY, Spool
from quark_onnx.api import quantize
from quark_onnx.common.errors import (
    DataError,
    QuarkError,
    TimeLimitError,
    data_errors,
)
from quark_onnx.common.progress import Progress, time_limit
from quark_onnx.config import QConfig
from quark_onnx.job import Result
from quark_onnx.measuring.calibration import Calibration
from quark_onnx.running.run import sample_key

T = TypeVar("T")

#: The second of every EVERY samples is held out. The first one is not: a single sample is then
#: left for calibration.
EVERY = 4


class SplitData:
    """Samples of one reading, split into calibration samples and held-out samples.

    Attributes:
        calibration: the samples to calibrate on.
        judges: the samples that are held out of calibration.
        key: a key that depends on the content and the order of all samples.
    """

    def __init__(self) -> None:
        # Two spools share the memory of one; samples beyond it lie on the disk.
        self.calibration = Spool(memory=MEMORY // 2)
        self.judges = Spool(memory=MEMORY // 2)
        self.key = ""

    def read(
        self,
        reader: Iterable[Mapping[str, Any]],
        length: int | None,
        *,
        most: int,
        progress: bool | None = False,
    ) -> None:
        """Read the data, and hold samples out.

        Args:
            reader: the samples, which fit the model.
            length: their number; None if unknown.
            most: the greatest number of samples that judge; 0 to calibrate on all.
            progress: whether to show progress.

        Raises:
            DataError: a sample does not fit, or there are too few to hold one out.
        """
        with data_errors(), Progress(progress, length, "reading", "sample") as bar:
            for index, sample in enumerate(reader):
                held_out = index % EVERY == 1 and len(self.judges) < most
                (self.judges if held_out else self.calibration).append(sample)
                # The key of all samples so far is chained into the next one: order matters, too.
                self.key = sample_key(sample, self.key)
                bar.update(index + 1)
        if most and not len(self.judges):
            raise DataError(
                "this needs at least two samples, one to calibrate on and another to"
                " judge by; the data has one",
            )

    def close(self) -> None:
        """Delete the samples and their files."""
        self.calibration.close()
        self.judges.close()


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The end of a run.

    Attributes:
        found: what the judge returned; None after a failure.
        seconds: runtime of quantization and judgement.
        error: reason of the failure; empty without one.
    """

    found: T | None
    seconds: float
    error: str = ""


class Runs:
    """Runs of one model with several configurations, within a budget."""

    def __init__(
        self,
        model: str | Path | ModelProto,
        samples: Spool,
        budget: float | None = None,
        task: str = "auto",
        ranges: Calibration | str | Path | None = None,
    ) -> None:
        """Start the clock of the budget.

        Args:
            model: the float model.
            samples: the samples of each run.
            budget: time limit in seconds for all runs; None for no limit.
            task: as for ``quantize``.
            ranges: earlier ranges for all runs; None to measure them.
        """
        self._model, self._samples, self._task = model, samples, task
        self._budget, self._start = budget, perf_counter()
        # A tensor that no optimizer changed is measured once.
        self._ranges = Calibration("") if ranges is None else ranges

    @property
    def is_limited(self) -> bool:
        """Whether there is a budget."""
        return self._budget is not None

    def has_time(self, seconds: float) -> bool:
        """Return whether a run of so many seconds would end within the budget."""
        if self._budget is None:
            return True
        return perf_counter() - self._start + seconds < self._budget

    def quantized(self, config: QConfig) -> Result:
        """Return the result of a configuration, on ranges that are measured once."""
        return quantize(
            self._model,
            self._samples,
            config,
            # Configurations without measured activations have no ranges.
            ranges=self._ranges if config.measures else None,
            task=self._task,
        )

    def run(
        self, config: QConfig, judge: Callable[[Result], T], *, limited: bool = True
    ) -> Outcome[T] | None:
        """Quantize and judge; return None if the budget was over before the end.

        Args:
            config: the configuration.
            judge: function of the result; its errors of this package are a failure of the run.
            limited: False for a run that always ends.
        """
        start = perf_counter()
        limit = None
        if self._budget is not None and limited:
            # The budget counts from the first run, and not from this one.
            limit = max(self._budget - (start - self._start), 0.0)
        try:
            with time_limit(limit):
                found = judge(self.quantized(config))
        except TimeLimitError:
            return None
        except QuarkError as error:
            seconds = perf_counter() - start
            return Outcome(None, seconds, " ".join(str(error).split()))
        return Outcome(found, perf_counter() - start)
