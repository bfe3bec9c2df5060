"""Run a model over the calibration data, batch by batch, and let each observed tensor's statistic take it in.

Only one batch and its activations are alive at a time. Extremes are reduced inside the graph, so that MinMax moves no
activation out of onnxruntime; histograms need the values themselves.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from calibrators.base import Calibrator, Statistic
from calibrators.errors import DataError
from calibrators.extremes import Extremes, MovingExtremes
from calibrators.layout import rows
from calibrators.session import open_session

Sample = Mapping[str, NDArray[Any]]
Progress = Callable[[int], None]

#: Samples per task given to an executor, and tasks under way at once: what bounds the memory of a parallel run.
_SHARD = 4
_IN_FLIGHT = 8

_MIN, _MAX = "__calibrators_min", "__calibrators_max"


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

    @property
    def reduced(self) -> bool:
        """Whether minimum and maximum, taken inside the graph, are all that is needed."""
        return self.axis is None and isinstance(self.calibrator.statistic(), Extremes | MovingExtremes)


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
        threads: threads per onnxruntime session, 0 for its default.
        progress: called with the number of samples done so far.

    Raises:
        DataError: a batch that onnxruntime cannot run; the message names its index and the cause.
    """
    watch = _Watch.on(model, observations, threads)
    return watch.serial(samples, progress) if executor is None else watch.sharded(samples, executor, progress)


@dataclass(frozen=True)
class _Watch:
    """The augmented model and what to read off it; picklable, so that it can travel to a worker."""

    model: bytes | onnx.ModelProto
    key: str
    observations: tuple[Observation, ...]
    threads: int

    @classmethod
    def on(cls, model: onnx.ModelProto, observations: Sequence[Observation], threads: int) -> _Watch:
        augmented = _augmented(model, observations)
        data: bytes | onnx.ModelProto = augmented
        if augmented.ByteSize() < 1 << 30:
            data = augmented.SerializeToString()
        digest = hashlib.sha256(data if isinstance(data, bytes) else str(id(model)).encode()).hexdigest()
        return cls(data, digest, tuple(observations), threads)

    def empty(self) -> list[Statistic]:
        return [observation.calibrator.statistic() for observation in self.observations]

    def serial(self, samples: Iterable[Sample], progress: Progress | None) -> list[Statistic]:
        session, iterator, done = _Session(self), iter(samples), 0
        while (sample := next(iterator, None)) is not None:
            session.observe(sample, done)
            del sample  # before the next one is made
            done += 1
            if progress:
                progress(done)
        return session.statistics

    def sharded(self, samples: Iterable[Sample], executor: Executor, progress: Progress | None) -> list[Statistic]:
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
                    for mine, theirs in zip(total, future.result(), strict=True):
                        mine.merge(theirs)
                    done += count
                    if progress:
                        progress(done)
        finally:
            for _, future in under_way:
                future.cancel()


class _Session:
    """An open session on the augmented model, and the statistics of what has run through it."""

    def __init__(self, watch: _Watch) -> None:
        self._session = open_session(watch.model, threads=watch.threads)
        self._inputs = {value.name for value in self._session.get_inputs()}
        floats = {value.name for value in self._session.get_outputs() if value.type == "tensor(float)"}
        fetched: dict[str, None] = {}
        self._readers: list[tuple[int, Observation]] = []
        self.statistics = watch.empty()
        for place, observation in enumerate(watch.observations):
            names = _outputs(observation, self._inputs)
            if floats.issuperset(names):
                fetched.update(dict.fromkeys(names))
                self._readers.append((place, observation))
        self._outputs = list(fetched)

    def observe(self, sample: Sample, index: int) -> None:
        feeds = {name: value for name, value in sample.items() if name in self._inputs}
        try:
            values = self._session.run(self._outputs, feeds) if self._outputs else []
        except Exception as error:  # onnxruntime raises several unrelated types
            raise DataError(f"sample {index}: onnxruntime could not run the model on it: {error}") from error
        found = dict(zip(self._outputs, values, strict=True))
        del values
        for place, observation in self._readers:
            statistic: Any = self.statistics[place]
            names = _outputs(observation, self._inputs)
            if not names:
                statistic.observe(rows(feeds[observation.tensor], observation.axis))
            elif observation.reduced:
                statistic.observe_bounds(*(np.float64(found[name]).reshape(1) for name in names))
            else:
                statistic.observe(rows(found[names[0]], observation.axis))


_open: dict[str, _Session] = {}


def _observe_shard(watch: _Watch, shard: list[Sample], first: int) -> list[Statistic]:
    """Runs in a worker: the session is opened once per process and model."""
    if watch.key not in _open:
        _open.clear()
        _open[watch.key] = _Session(watch)
    session = _open[watch.key]
    session.statistics = watch.empty()
    for offset, sample in enumerate(shard):
        session.observe(sample, first + offset)
    return session.statistics


def _outputs(observation: Observation, inputs: Container[str]) -> list[str]:
    """The outputs of the augmented model that an observation reads; none for an input, which is read off the sample."""
    name = observation.tensor
    if name in inputs:
        return []
    return [name + _MIN, name + _MAX] if observation.reduced else [name]


def _augmented(model: onnx.ModelProto, observations: Sequence[Observation]) -> onnx.ModelProto:
    """A copy of ``model`` whose outputs are the observed tensors, or their extremes."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    inputs = {value.name for value in graph.input}
    wanted = dict.fromkeys(
        (name, observation.tensor) for observation in observations for name in _outputs(observation, inputs)
    )
    if wanted:
        del graph.output[:]
    for name, tensor in wanted:
        if name == tensor:
            graph.output.append(onnx.ValueInfoProto(name=name))
        else:
            kind = "ReduceMin" if name.endswith(_MIN) else "ReduceMax"
            graph.node.append(helper.make_node(kind, [tensor], [name], keepdims=0))
            graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, []))
    return result
