"""Run a model over the calibration data, batch by batch, and let each observed tensor's statistic take it in.

Only one batch and its activations are alive at a time, and a second one that is prefetched.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.base import Calibrator, Statistic
from calibrators.errors import CalibrationError, DataError
from calibrators.extremes import MovingExtremes
from calibrators.layout import rows
from calibrators.session import PROTOBUF_LIMIT, estimate_bytes, open_session

Sample = Mapping[str, NDArray[Any]]
Progress = Callable[[int], None]

#: Samples per task given to an executor, and tasks under way at once: what bounds the memory of a parallel run.
_SHARD = 4
_IN_FLIGHT = 8


@dataclass(frozen=True)
class Observation:
    """A tensor to watch.

    Attributes:
        tensor: its name in the model.
        calibrator: decides which statistic is kept.
        axis: channel axis of a per-channel statistic; None per tensor.
    """

    tensor: str
    calibrator: Calibrator
    axis: int | None = None


def collect(
    model: onnx.ModelProto,
    observations: Sequence[Observation],
    samples: Iterable[Sample],
    *,
    executor: Executor | None = None,
    threads: int = 0,
    progress: Progress | None = None,
) -> list[Statistic]:
    """One pass over ``samples``; the statistic of each observation, in their order.

    A tensor that is not float, or never had a value, leaves its statistic empty (``lo.size == 0``).

    Args:
        model: the float model; it is not changed.
        observations: what to watch: tensors and inputs of the main graph.
        samples: batches of {input name: array}; shapes may differ from batch to batch.
        executor: shards the samples over its workers; statistics merge to the serial result.
        threads: cores to use in this process, 0 for all; with an executor, threads of each worker's session, 0 for
            its share of the cores.
        progress: called with the number of samples done so far.

    Raises:
        CalibrationError: onnxruntime cannot open the model, or a tensor is unknown.
        DataError: a batch that onnxruntime cannot run; the message names its index and the cause.
    """
    if executor is not None and not threads:
        workers = getattr(executor, "_max_workers", 1)  # of the executors of the standard library
        threads = max(1, (os.cpu_count() or 1) // workers)
    watch = _Watch.on(model, observations, threads)
    return watch.local(samples, progress) if executor is None else watch.sharded(samples, executor, progress)


@dataclass(frozen=True)
class _Watch:
    """The augmented model and what to read off it; picklable, so that it can travel to a worker."""

    model: bytes | onnx.ModelProto
    key: str
    observations: tuple[Observation, ...]
    threads: int

    @classmethod
    def on(cls, model: onnx.ModelProto, observations: Sequence[Observation], threads: int) -> _Watch:
        extra = _additions(model, observations)
        data: bytes | onnx.ModelProto
        if estimate_bytes(model) < PROTOBUF_LIMIT:
            data = model.SerializeToString() + extra.SerializeToString()  # protobuf merges what is concatenated
            key = hashlib.sha256(data + repr(observations).encode()).hexdigest()
        else:
            data = onnx.ModelProto()
            data.CopyFrom(model)
            data.MergeFrom(extra)
            key = uuid.uuid4().hex
        return cls(data, key, tuple(observations), threads)

    def empty(self) -> list[Statistic]:
        return [observation.calibrator.statistic() for observation in self.observations]

    def local(self, samples: Iterable[Sample], progress: Progress | None) -> list[Statistic]:
        """Two lanes in this process: one runs a batch while the other counts, each on its share of the cores.

        A lane has statistics of its own; as they merge exactly, it does not matter which batch went where. Averages,
        which depend on the order, and a single core get one lane.
        """
        cores = self.threads or os.cpu_count() or 1
        ordered = any(isinstance(statistic, MovingExtremes) for statistic in self.empty())
        idle = [self.empty() for _ in range(1 if ordered or cores == 1 else 2)]
        session, iterator, sent, done = _Session(self, threads=max(1, cores // len(idle))), iter(samples), 0, 0
        busy: dict[Future[None], list[Statistic]] = {}
        with ThreadPoolExecutor(len(idle)) as pool:
            while True:
                sample = next(iterator, None) if idle else None
                if sample is not None:
                    statistics = idle.pop()
                    busy[pool.submit(session.observe, sample, sent, statistics)] = statistics
                    sent += 1
                elif busy:
                    for finished in wait(busy, return_when=FIRST_COMPLETED).done:
                        idle.append(busy.pop(finished))
                        finished.result()
                        done += 1
                    if progress:
                        progress(done)
                else:
                    break
                del sample  # before the next one is made
        total = idle.pop()
        for statistics in idle:
            _merge(total, statistics)
        return total

    def sharded(self, samples: Iterable[Sample], executor: Executor, progress: Progress | None) -> list[Statistic]:
        """A few samples at a time go to the workers of an executor."""
        total, iterator, sent, done = self.empty(), iter(samples), 0, 0
        under_way: deque[tuple[int, Future[list[Statistic]]]] = deque()
        try:
            while True:
                shard = list(islice(iterator, _SHARD))
                if shard:
                    under_way.append((len(shard), executor.submit(_observe_shard, self, shard, sent)))
                    sent += len(shard)
                if not under_way:
                    return total
                if not shard or len(under_way) >= _IN_FLIGHT:
                    count, future = under_way.popleft()  # in the order of the samples: moving averages depend on it
                    _merge(total, future.result())
                    done += count
                    if progress:
                        progress(done)
        finally:
            for _, future in under_way:
                future.cancel()


def _merge(total: list[Statistic], more: list[Statistic]) -> None:
    for mine, theirs in zip(total, more, strict=True):
        mine.merge(theirs)


class _Session:
    """An open session on the augmented model; it may be used from several threads."""

    def __init__(self, watch: _Watch, threads: int) -> None:
        try:
            self._session = open_session(watch.model, threads=threads)
        except Exception as error:  # onnxruntime raises several unrelated types
            raise CalibrationError(f"onnxruntime cannot open the model with its tensors exposed: {error}") from error
        self._readers: dict[str, list[tuple[int, int | None]]] = {}
        for place, observation in enumerate(watch.observations):
            self._readers.setdefault(observation.tensor, []).append((place, observation.axis))
        self._inputs = {value.name for value in self._session.get_inputs()}
        watched = self._readers.keys() - self._inputs
        types = {value.name: value.type for value in self._session.get_outputs()}
        self._outputs = [name for name, kind in types.items() if name in watched and kind == "tensor(float)"]

    def observe(self, sample: Sample, index: int, statistics: list[Any]) -> None:
        """Run one batch and let the statistics of the observed tensors take it in."""
        values = {name: value for name, value in sample.items() if name in self._inputs}
        try:
            found = self._session.run(self._outputs, values) if self._outputs else []
        except Exception as error:  # onnxruntime raises several unrelated types
            raise DataError(f"sample {index}: onnxruntime could not run the model on it: {error}") from error
        values.update(zip(self._outputs, found, strict=True))
        del found
        for tensor, readers in self._readers.items():
            value = values.pop(tensor, None)  # so that it is freed as soon as it is counted
            if isinstance(value, np.ndarray) and value.dtype == np.float32:
                for place, axis in readers:
                    statistics[place].observe(rows(value, axis))


_open: dict[str, _Session] = {}


def _observe_shard(watch: _Watch, shard: list[Sample], first: int) -> list[Statistic]:
    """Runs in a worker: the session is opened once per process and model."""
    session = _open.get(watch.key)
    if session is None:
        _open.clear()
        session = _open[watch.key] = _Session(watch, watch.threads)
    statistics = watch.empty()
    for offset, sample in enumerate(shard):
        session.observe(sample, first + offset, statistics)
    return statistics


def _additions(model: onnx.ModelProto, observations: Sequence[Observation]) -> onnx.ModelProto:
    """What has to be added to ``model`` so that the observed tensors are outputs; onnxruntime infers their types."""
    result = onnx.ModelProto()
    exposed = {value.name for value in (*model.graph.input, *model.graph.output)}
    for name in dict.fromkeys(observation.tensor for observation in observations):
        if name not in exposed:
            result.graph.output.append(onnx.ValueInfoProto(name=name))
    return result
