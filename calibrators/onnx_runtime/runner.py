"""Run a model over the calibration data, and update the statistics of observed tensors.

Only one batch and its activations are alive at a time, and a second one that is prefetched.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextvars import copy_context
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.base import Statistic
from calibrators.errors import CalibrationError, DataError
from calibrators.extremes import MovingExtremes
from calibrators.layout import rows
from calibrators.names import names_of
from calibrators.onnx_runtime.control_flow import Control, Observation, Scope
from calibrators.onnx_runtime.cpu_features import available_cores
from calibrators.onnx_runtime.custom_operators import (
    Library,
    current_libraries,
    libraries,
)
from calibrators.onnx_runtime.external_tensors import is_stored
from calibrators.onnx_runtime.external_tensors import values as values_of
from calibrators.onnx_runtime.interrupt import AT_ONCE, Lanes
from calibrators.onnx_runtime.isolation import current
from calibrators.onnx_runtime.providers import current_provider, provider
from calibrators.onnx_runtime.session import PROTOBUF_LIMIT, open_session, run_uncopied
from calibrators.onnx_runtime.tensors import estimate_bytes, initializers, loaded

Sample = Mapping[str, NDArray[Any]]
Progress = Callable[[int], None]
#: Called with the position of a sample and the outputs of the model on it.
Receive = Callable[[int, Mapping[str, Any]], None]

#: Samples per task of an executor, and concurrent tasks: both bound the memory of a parallel run.
_SHARD = 4
_IN_FLIGHT = 8


def collect(  # noqa: PLR0913  one call carries all options of a pass
    model: onnx.ModelProto | Callable[[], onnx.ModelProto],
    observations: Sequence[Observation],
    samples: Iterable[Sample],
    *,
    controls: Sequence[Control] = (),
    executor: Executor | None = None,
    threads: int = 0,
    progress: Progress | None = None,
    receive: Receive | None = None,
) -> list[Statistic]:
    """Run a pass over ``samples``, and return the statistics of the observations.

    The statistics come in the order of ``observations``, followed by those of ``controls``. A
    tensor that is not float, or never had a value, leaves its statistic empty (``lo.size == 0``).

    Args:
        model: the float model, which is not changed; or a function that creates it, so that it
            takes memory no longer than needed.
        observations: tensors and inputs of the main graph to observe.
        samples: batches of {input name: array}; shapes may differ from batch to batch.
        controls: nodes whose bodies are observed, too.
        executor: distributes the samples over its workers; statistics merge to the serial result.
        threads: cores to use in this process, 0 for all; with an executor, threads of each worker's
            session, 0 for its share of the cores.
        progress: called with the number of samples done so far.
        receive: called with the outputs of the model on each sample; not with an executor, whose
            workers would have to send them.

    Raises:
        CalibrationError: onnxruntime cannot open the model, or a tensor is unknown.
        DataError: onnxruntime cannot run a batch; the message names its index and the cause.
    """
    if executor is not None and not threads:
        # The executors of the standard library have this attribute.
        # Each worker has a session: with all cores for each of them they would fight for the cores.
        workers = getattr(executor, "_max_workers", 1)
        threads = max(1, available_cores() // workers)
    scope = Scope(
        model if isinstance(model, onnx.ModelProto) else model(),
        tuple(observations),
        tuple(controls),
    )
    watch = _Watch.on(scope, threads, named=executor is not None)
    results = _results(scope.model) if receive is not None else []
    # Free the model: the watch has its bytes, and later the session its weights.
    del scope
    if executor is not None:
        return watch.sharded(samples, executor, progress)
    lanes = watch.lanes()
    session = _Session.on(
        watch, max(1, (threads or available_cores()) // len(lanes)), results
    )
    del watch

    def done(position: int, outputs: list[Any]) -> None:
        if receive is None or not results:
            return
        # An array of onnxruntime keeps the memory of all activations.
        copies = dict[str, Any]()
        for name, value in zip(results, outputs, strict=True):
            copies[name] = np.array(value) if isinstance(value, np.ndarray) else value
        receive(position, copies)

    return _local(session, lanes, samples, progress, done)


def _results(model: onnx.ModelProto) -> list[str]:
    """Return the outputs of a model; none if an output is an input."""
    names = names_of(model.graph.output)
    return names if set(names).isdisjoint(names_of(model.graph.input)) else []


@dataclass(frozen=True)
class _Watch:
    """The model to run and the observations; picklable, to be sent to a worker.

    Attributes:
        scope: the main graph, with its observed tensors among the outputs.
        model: the same model, as bytes where a protobuf message can hold it.
        key: identifies the watch.
        threads: threads of a session.
        defaults: values of optional inputs that bodies read.
        libraries: libraries of custom operators, for the sessions of workers.
        provider: provider of onnxruntime, for the sessions of workers; empty for the CPU's.
    """

    scope: Scope
    model: bytes | onnx.ModelProto
    key: str
    threads: int
    defaults: Mapping[str, NDArray[Any]]
    libraries: tuple[Library, ...]
    provider: str

    @classmethod
    def on(cls, scope: Scope, threads: int, *, named: bool = True) -> _Watch:
        """Prepare a scope; ``named``: compute the key by which workers recognize the watch.

        Workers may be other processes, which cannot read the arrays of held tensors.
        """
        model = loaded(scope.model) if named else scope.model
        extra = _additions(scope)
        stored = any(is_stored(tensor) for tensor in initializers(model.graph))
        data: bytes | onnx.ModelProto
        if estimate_bytes(model) < PROTOBUF_LIMIT and not stored:
            data = _joined(model, extra)
            key = _key(data, scope) if named else ""
        else:
            data = onnx.ModelProto()
            data.CopyFrom(model)
            data.MergeFrom(extra)
            # Hashing gigabytes of weights takes longer than opening the session once more.
            key = uuid.uuid4().hex
        # A default value is known to the runtime, but not to the bodies that run outside of it.
        read = set().union(*(control.reads for control in scope.controls))
        inputs = read.intersection(names_of(model.graph.input))
        defaults = {
            tensor.name: values_of(tensor)
            for tensor in model.graph.initializer
            if tensor.name in inputs
        }
        # Without the weights, which ``data`` holds already.
        bare = onnx.ModelProto()
        bare.graph.input.extend(model.graph.input)
        scope = replace(scope, model=bare)
        libraries, provider = current_libraries(), current_provider()
        return cls(scope, data, key, threads, defaults, libraries, provider)

    def empty(self) -> list[Statistic]:
        """Return empty statistics, per observation."""
        return [observation.calibrator.statistic() for observation in self.scope.flat()]

    def lanes(self) -> list[list[Statistic]]:
        """Return empty statistics, per lane: see ``_local``."""
        cores = self.threads or available_cores()
        statistics = self.empty()
        if cores == 1 or any(_is_ordered(statistic) for statistic in statistics):
            return [statistics]
        return [statistics, *(self.empty() for _ in range(AT_ONCE - 1))]

    def sharded(
        self, samples: Iterable[Sample], executor: Executor, progress: Progress | None
    ) -> list[Statistic]:
        """Distribute the samples over the workers of an executor, a few at a time."""
        total = self.empty()
        iterator = iter(samples)
        sent = 0
        done = 0
        under_way: deque[tuple[int, Future[list[Statistic]]]] = deque()
        try:
            while True:
                shard = list(islice(iterator, _SHARD))
                if shard:
                    # The position of the first sample, for messages of the worker.
                    under_way.append((len(shard), _submit(executor, self, shard, sent)))
                    sent += len(shard)
                if not under_way:
                    return total
                if not shard or len(under_way) >= _IN_FLIGHT:
                    # In the order of the samples, as moving averages depend on it.
                    count, future = under_way.popleft()
                    _merge(total, future.result())
                    done += count
                    if progress:
                        progress(done)
        finally:
            for _, future in under_way:
                future.cancel()


def _is_ordered(statistic: Statistic) -> bool:
    """Return whether a statistic depends on the order of the batches."""
    return isinstance(statistic, MovingExtremes)


def _joined(model: onnx.ModelProto, extra: onnx.ModelProto) -> bytes:
    """Serialize a model with additional outputs; the model is large, and not copied."""
    count = len(model.graph.output)
    model.graph.output.extend(extra.graph.output)
    try:
        return model.SerializeToString()
    finally:
        del model.graph.output[count:]


def _key(data: bytes, scope: Scope) -> str:
    """Return a hash of the model, the observations, the isolation and the libraries."""
    isolation = current()
    # Threads keep a session from call to call, which must not outlive its isolation.
    where = "" if isolation is None else isolation.number
    key = hashlib.sha256(data)
    context = current_libraries(), current_provider()
    key.update(repr((where, list(scope.flat()), context)).encode())
    return key.hexdigest()


def _local(
    session: _Session,
    idle: list[list[Statistic]],
    samples: Iterable[Sample],
    progress: Progress | None,
    receive: Callable[[int, list[Any]], None],
) -> list[Statistic]:
    """Run the samples in-process, in lanes with a share of the cores.

    Of two lanes one runs a batch while the other updates its statistics. A lane has statistics of
    its own; they merge exactly, so that the assignment of batches to lanes does not matter.
    Averages, which depend on the order, and a single core get one lane.

    Args:
        idle: empty statistics of each lane; changed in place.
        samples: the batches, read one at a time while a lane is idle.
        progress: called with the number of batches done so far.
        receive: called with the position of a batch and the results of the session.
    """
    iterator = iter(samples)
    sent = 0
    done = 0
    busy: dict[Future[list[Any]], tuple[int, list[Statistic]]] = {}
    with Lanes(len(idle)) as pool:
        while True:
            sample = next(iterator, None) if idle else None
            if sample is not None:
                statistics = idle.pop()
                running = pool.submit(session.observe, sample, sent, statistics)
                busy[running] = (sent, statistics)
                sent += 1
            elif busy:
                # All lanes are busy, or the samples have ended.
                for finished in wait(busy, return_when=FIRST_COMPLETED).done:
                    position, statistics = busy.pop(finished)
                    idle.append(statistics)
                    receive(position, finished.result())
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


def _submit(
    executor: Executor, watch: _Watch, shard: list[Sample], first: int
) -> Future[list[Statistic]]:
    """Submit a few samples to an executor.

    A thread must see whether sessions are isolated; a process is isolated already.
    """
    if isinstance(executor, ThreadPoolExecutor):
        return executor.submit(copy_context().run, _observe_shard, watch, shard, first)
    return executor.submit(_observe_shard, watch, shard, first)


def _merge(total: list[Statistic], more: list[Statistic]) -> None:
    for mine, theirs in zip(total, more, strict=True):
        mine.merge(theirs)


class _Session:
    """An open session on a scope, for use from several threads."""

    def __init__(
        self,
        scope: Scope,
        model: bytes | onnx.ModelProto,
        threads: int,
        results: Sequence[str] = (),
    ) -> None:
        """Open a session.

        Args:
            scope: the graph with its observations.
            model: the model of the scope, with observed tensors among the outputs.
            results: outputs of the model that ``observe`` returns.

        Raises:
            CalibrationError: onnxruntime cannot open the model.
        """
        try:
            self._session = open_session(
                model, threads=threads, what="the float model with its tensors exposed"
            )
        except Exception as error:  # onnxruntime raises several unrelated types
            raise CalibrationError(
                f"onnxruntime cannot open the model with its tensors exposed: {error}",
            ) from error
        self._readers: dict[str, list[tuple[int, int | None]]] = {}
        for number, observation in enumerate(scope.observations):
            self._readers.setdefault(observation.tensor, []).append(
                (number, observation.axis),
            )
        self._inputs = set(names_of(self._session.get_inputs()))
        self._results = list(results)
        self._needed = set().union(
            *(control.reads for control in scope.controls), results
        )
        types = {value.name: value.type for value in self._session.get_outputs()}
        self._outputs = []
        for name, kind in types.items():
            # Integers and booleans have no range; float16 models are calibrated in float32.
            observed = name in self._readers and kind == "tensor(float)"
            if name not in self._inputs and (name in self._needed or observed):
                self._outputs.append(name)
        self._bodies = list[tuple[Control, str, _Body]]()
        # Statistics of a scope: its own first, then those of each body, as ``Scope.flat`` yields
        # them.
        first = len(scope.observations)
        for control in scope.controls:
            for attribute, body in control.bodies.items():
                self._bodies.append(
                    (control, attribute, _Body.on(body, first, threads)),
                )
                first += len(list(body.flat()))
        self._controls = scope.controls
        self._defaults: Mapping[str, NDArray[Any]] = {}

    @classmethod
    def on(cls, watch: _Watch, threads: int, results: Sequence[str] = ()) -> _Session:
        """Open a session on a watch."""
        session = cls(watch.scope, watch.model, threads, results)
        session._defaults = watch.defaults
        return session

    def observe(
        self, sample: Mapping[str, Any], index: int, statistics: list[Any]
    ) -> list[Any]:
        """Run one batch, update the statistics of the observed tensors, and return ``results``.

        Args:
            sample: arrays by input name; further names are ignored.
            index: position of the batch in the data, for messages.
            statistics: those of the scope and of its bodies, in the order of ``Scope.flat``.

        Raises:
            DataError: onnxruntime cannot run the batch.
        """
        values = {name: value for name, value in sample.items() if name in self._inputs}
        try:
            computed = []
            if self._outputs:
                computed = run_uncopied(self._session, self._outputs, values)
        except Exception as error:  # onnxruntime raises several unrelated types
            raise DataError(
                f"sample {index}: onnxruntime could not run the model on it: {error}",
            ) from error
        values = {
            **self._defaults,
            **values,
            **dict(zip(self._outputs, computed, strict=True)),
        }
        del computed
        for tensor, readers in self._readers.items():
            # Tensors that no body needs are freed after they are counted.
            if tensor in self._needed:
                value = values.get(tensor)
            else:
                value = values.pop(tensor, None)
            if isinstance(value, np.ndarray) and value.dtype == np.float32:
                for number, axis in readers:
                    statistics[number].observe(rows(value, axis))
        for control in self._controls:
            bodies = {
                attribute: body
                for owner, attribute, body in self._bodies
                if owner is control
            }
            self._play(control, bodies, values, index, statistics)
        return [values[name] for name in self._results]

    @staticmethod
    def _play(
        control: Control,
        bodies: dict[str, _Body],
        values: dict[str, Any],
        index: int,
        statistics: list[Any],
    ) -> None:
        """Run the bodies of a node as its operator prescribes.

        Args:
            bodies: its bodies by attribute.
            values: inputs of the node, and tensors that the bodies capture, by name.
            index: position of the batch, for messages.
            statistics: those of the graph that holds the node.
        """
        steps = control.play(values)
        try:
            attribute, inputs = next(steps)
            while True:
                outputs = bodies[attribute].run(inputs, values, index, statistics)
                attribute, inputs = steps.send(outputs)
        except StopIteration:
            return
        except DataError as error:
            raise DataError(
                f"{error} (inside {control.kind} {control.name!r})",
            ) from error


@dataclass(frozen=True)
class _Body:
    """A body, run step by step."""

    session: _Session
    inputs: list[onnx.ValueInfoProto]
    borrowed: frozenset[str]
    places: slice

    @classmethod
    def on(cls, scope: Scope, first: int, threads: int) -> _Body:
        """Open a session on a body, whose statistics start at index ``first``."""
        model = onnx.ModelProto()
        model.CopyFrom(scope.model)
        model.MergeFrom(_additions(scope))
        results = names_of(scope.model.graph.output)
        count = len(list(scope.flat()))
        inputs = [
            value for value in model.graph.input if value.name not in scope.borrowed
        ]
        return cls(
            _Session(scope, model, threads, results),
            inputs,
            scope.borrowed,
            slice(first, first + count),
        )

    def run(
        self,
        inputs: list[Any],
        outer: Mapping[str, Any],
        index: int,
        statistics: list[Any],
    ) -> list[Any]:
        """Run the body on its own inputs and on captured outer values.

        Args:
            inputs: values in the order of the body's own inputs.
            outer: values of the outer graph by name, with those that the body captures.
            index: position of the batch, for messages.
            statistics: those of the outer graph, of which the body has a part.

        Returns:
            The outputs of the body, in order.
        """
        feeds = {name: outer[name] for name in self.borrowed}
        for value, given in zip(self.inputs, inputs, strict=True):
            # Scalars, such as a Loop's condition, may be declared with shape (1,).
            single = (
                len(value.type.tensor_type.shape.dim) == 1
                and isinstance(given, np.ndarray)
                and not given.ndim
            )
            feeds[value.name] = given.reshape(1) if single else given
        return self.session.observe(feeds, index, statistics[self.places])


_open: dict[str, _Session] = {}


def _observe_shard(watch: _Watch, shard: list[Sample], first: int) -> list[Statistic]:
    """Observe samples in a worker, which opens a session once per process and model."""
    session = _open.get(watch.key)
    if session is None:
        # One session per worker: the session of the previous model would keep its weights in
        # memory.
        _open.clear()
        with libraries(watch.libraries), provider(watch.provider):
            session = _open[watch.key] = _Session.on(watch, watch.threads)
    statistics = watch.empty()
    for offset, sample in enumerate(shard):
        session.observe(sample, first + offset, statistics)
    return statistics


def _additions(scope: Scope) -> onnx.ModelProto:
    """Return the missing outputs of a model for the observed tensors.

    onnxruntime infers their types.
    """
    result = onnx.ModelProto()
    graph = scope.model.graph
    exposed = set(names_of((*graph.input, *graph.output)))
    wanted = [observation.tensor for observation in scope.observations]
    for control in scope.controls:
        # Sorted, as the order of a set differs from process to process, and the key is a hash of
        # the model.
        wanted += sorted(control.reads)
    for name in dict.fromkeys(wanted):
        if name not in exposed:
            result.graph.output.append(onnx.ValueInfoProto(name=name))
    return result
