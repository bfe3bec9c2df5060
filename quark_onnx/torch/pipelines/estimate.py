"""Estimate of memory use, disk use and runtime before a checkpoint is quantized."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.algorithms.cost import (
    BATCH_TOKENS,
    Cost,
    Shapes,
    cost_of,
    evaluation_cost,
)
from quark_onnx.torch.algorithms.gptq.solver import Solver
from quark_onnx.torch.algorithms.weight_rounding.levels import TensorLevels
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.meta_model import dtype_of
from quark_onnx.torch.checkpoints.quark_tensors import stored
from quark_onnx.torch.config.algorithm_order import at_stage
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.models.mixtures import token_shares
from quark_onnx.torch.models.quantized_layer import Layers, kind_of, outputs_first
from quark_onnx.torch.models.structure import blocks_of, embedding_of
from quark_onnx.torch.pipelines.tensor_files import size_of_files, tensor_files
from quark_onnx.torch.runtime.memory import resident

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Bytes per weight of the largest matrix, as codes and packed; temporary bytes while a part of it
#: is rounded.
_WORKING, _ON_THE_WAY = 6, 48 << 20
#: Rows and columns of the matrix for the timing of products and rounding; rows for the size of
#: codes.
_ROWS, _COLUMNS, _SOME = 512, 2048, 64
#: Tokens of the timed product; bytes of a timed read, and number of reads.
_TOKENS, _READ, _PARTS = 256, 1 << 22, 8
#: Tokens that a block runs at once; bytes per attention probability, in addition to three values
#: of the model's type.
AT_ONCE, _SOFTMAX = BATCH_TOKENS, 4
#: Names in configurations for the number of experts that run on a token.
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
#: Most bytes per second that a system takes for writing; reading may be faster, from memory.
_WRITTEN = 1e9
#: Scheduling statistics of the current thread, on Linux.
_SCHEDULED = Path("/proc/thread-self/schedstat")
#: Columns of the timed sweep.
_SWEPT = 128
#: Most runs of a probe, and seconds after which it ends.
_MOST, _BUDGET = 20, 0.15
#: Least runtime of a probe in seconds.
_SHORTEST = 1e-7


@dataclass(frozen=True)
class Estimate:
    """Estimated resources of a run.

    Attributes:
        memory: bytes.
        disk: bytes.
        seconds: runtime with the evaluation; the part of algorithms is a rough guess.
        algorithms: algorithms without an estimate; their cost is not included.
        evaluated: number of tokens on which both models run after quantization.
        evaluation: part of ``seconds`` that the evaluation takes.
        shorter: options of ``llm ptq`` that shorten the run, each with its runtime in seconds.

    >>> print(Estimate(3 << 30, 1 << 29, 170.0))
    about 3.0 GiB of memory, 512 MiB of disk, 3 min
    """

    memory: int
    disk: int
    seconds: float
    algorithms: tuple[str, ...] = ()
    evaluated: int = 0
    evaluation: float = 0.0
    shorter: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        span = duration(self.seconds)
        text = f"about {size(self.memory)} of memory, {size(self.disk)} of disk, {span}"
        if not self.algorithms:
            return text
        return f"{text}, and what {' and '.join(self.algorithms)} takes"


def duration(seconds: float) -> str:
    """Format an estimated runtime.

    >>> duration(5), duration(150), duration(6000)
    ('5 s', '2 min', '1.7 h')
    """
    minutes = seconds / 60
    # one significant unit: estimates are not exact to the second
    if minutes < 1:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.1f} h"


def check_room(output: Path, needed: int) -> None:
    """Raise ConfigError if the disk of an output has too little free space.

    Args:
        output: file or folder, which may be missing.
        needed: number of bytes that are written.
    """
    place = output.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ConfigError(
            f"{output} takes about {size(needed)} of disk while it is written, and"
            f" {size(free)} are free there; free some, or name a folder on another disk",
        )


def size(count: int) -> str:
    """Format a number of bytes: in GiB with one decimal from 1 GiB on, otherwise in whole MiB."""
    if count >= 1 << 30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB"


def estimate(  # noqa: PLR0913
    source: FloatCheckpoint,
    chosen: Layers,
    tokens: int,
    *,
    disk: int,
    spilled: bool = False,
    samples: int = 1,
    algorithms: tuple[Any, ...] = (),
    evaluated: Sequence[int] = (),
    speed: Speed | None = None,
) -> Estimate:
    """Estimate the resources of quantizing a checkpoint file to file.

    Memory includes that of the current process.

    Args:
        source: the checkpoint.
        chosen: the layers to quantize, of the checkpoint's empty model.
        tokens: number of calibration tokens; 0 if the blocks are not run.
        disk: bytes of the result, as ``written_bytes`` returns.
        spilled: whether hidden states are kept in files.
        samples: number of calibration samples.
        algorithms: the algorithms of the configuration.
        evaluated: tokens of each window on which the written model and the float model are
            compared.
        speed: speed of this machine; measured if None.

    Returns:
        The estimate.
    """
    estimator = Estimator(source, chosen, disk, evaluated, spilled=spilled, speed=speed)
    return estimator.estimate(tokens, samples, algorithms)


class Estimator:
    """Estimator of several runs on the same layers of a checkpoint.

    The sizes of the model are computed once: a mixture of a trillion parameters has 70,000 layers.

    Args:
        source: the checkpoint.
        chosen: the layers to quantize, of the checkpoint's empty model.
        disk: bytes of the result, as ``written_bytes`` returns.
        evaluated: tokens of each window on which the written model and the float model are
            compared.
        spilled: whether hidden states are kept in files.
        speed: speed of this machine; measured if None.
    """

    def __init__(  # noqa: PLR0913
        self,
        source: FloatCheckpoint,
        chosen: Layers,
        disk: int,
        evaluated: Sequence[int] = (),
        *,
        spilled: bool = False,
        speed: Speed | None = None,
    ) -> None:
        self._source = source
        self._chosen = chosen
        self._disk = disk
        self._evaluated = evaluated
        self._spilled = spilled
        self._speed = speed or Speed(source)
        model = source.model
        self._dtype = dtype_of(model.config)
        self._width = _whole(_text(model), "hidden_size") or 1
        # tokens and samples differ between the runs that are compared
        self._shapes = shapes_of(model, chosen, 0, 0)
        blocks = _block_parameters(model)
        #: number of weights of the largest block, and outside of blocks without the heads
        self._block = max(map(_count, blocks), default=0)
        self._in_front = _count(_in_front(source, blocks))
        self._measure_weights()

    def _measure_weights(self) -> None:
        """Count the weights to quantize, and compute the size of their codes."""
        model = self._source.model
        #: format of the weights; None if no weight is quantized
        self._spec: TensorSpec | None = None
        self._count = self._largest = 0
        for module, spec in self._chosen.values():
            form = spec.weight
            if form is None:
                continue
            self._spec = self._spec or form
            weights = module.weight.numel()
            self._count += weights
            self._largest = max(self._largest, weights)
        every = [parameter.numel() for parameter in model.parameters()]
        # the largest tensor is in memory alone while it is copied, mostly the embedding
        self._alone = max(every) * self._dtype.itemsize
        floats = (sum(every) - self._count) * self._dtype.itemsize
        #: bytes of the quantized weights on disk, with scales and zero points
        self._codes = max(0, self._disk - floats)
        self._read = size_of_files(self._source.reader)

    def estimate(
        self, tokens: int, samples: int = 1, algorithms: tuple[Any, ...] = ()
    ) -> Estimate:
        """Estimate the resources of a run.

        Args:
            tokens: number of calibration tokens; 0 if the blocks are not run.
            samples: number of calibration samples.
            algorithms: the algorithms of the configuration.
        """
        shapes = replace(self._shapes, tokens=tokens, samples=samples)
        # algorithms without an estimate are named in the result
        more, unknown = cost_of(algorithms, shapes)
        evaluation = self._evaluation_seconds(shapes)
        seconds = self._writing_seconds()
        if self._spec is not None:
            seconds += self._count / self._speed.roundings(self._spec, self._dtype)
            if algorithms:
                seconds += self._algorithm_seconds(more, self._spec)
        if tokens:
            seconds += self._work(shapes.runs(1))
        # torch and transformers are loaded by now
        memory = resident() + self._largest * _WORKING + _ON_THE_WAY
        if tokens:
            # not the sum: the largest tensor is mostly the embedding, which is outside of the
            # blocks
            memory += max(self._alone, self._held(shapes, algorithms, more))
        else:
            memory += self._alone + more.memory
        return Estimate(
            memory,
            self._disk,
            seconds + evaluation,
            unknown,
            sum(self._evaluated),
            evaluation,
        )

    def _writing_seconds(self) -> float:
        """Return the time of reading the checkpoint and writing the result.

        Tensors are written singly, and copied into the file with its header.
        """
        reading = self._speed.reading()
        writing = min(reading, _WRITTEN)
        # the read of the result is that of the copy into the file
        return (self._read + self._disk) / reading + 2 * self._disk / writing

    def _evaluation_seconds(self, shapes: Shapes) -> float:
        if not self._evaluated:
            return 0.0
        reading = (self._read + self._disk) / self._speed.reading()
        return reading + self._work(evaluation_cost(shapes, self._evaluated))

    def _algorithm_seconds(self, cost: Cost, spec: TensorSpec) -> float:
        """Return the runtime of algorithms, which compute products in float32.

        Args:
            cost: work of all algorithms of the run together.
            spec: format of the weights that the algorithms round.

        Returns:
            The runtime in seconds.
        """
        # products have another dtype than the rest of the work
        products = Cost(products=cost.products)
        seconds = _work(self._speed, products, None, torch.float32, self._width)
        others = replace(cost, products=0.0)
        return seconds + _work(self._speed, others, spec, self._dtype, self._width)

    def _work(self, cost: Cost) -> float:
        """Return the runtime of running blocks, in the model's type."""
        return _work(self._speed, cost, None, self._dtype, self._width)

    def _held(self, shapes: Shapes, algorithms: tuple[Any, ...], more: Cost) -> int:
        """Return the bytes of a block with its codes, and of the data that runs through it.

        Args:
            shapes: sizes of the model, with the tokens and samples of the run.
            algorithms: the algorithms of the configuration; those that choose codes need a second
                set of hidden states.
            more: cost of the algorithms, of which the memory is added.

        Returns:
            The bytes: the modules before the blocks, the largest block in float and as codes, the
            hidden states of all tokens (none if they are spilled to files), the memory of the
            algorithms, and quantized attention probabilities.
        """
        tokens = shapes.tokens
        # in memory a code takes a byte at least, also where files pack two into one
        codes = self._block * max(1.0, self._codes / max(self._count, 1))
        states = 0
        if not self._spilled:
            hidden = _whole(_text(self._source.model), "hidden_size")
            states = tokens * hidden * self._dtype.itemsize
        # a second set for the quantized model (``BlockStream.split``)
        if at_stage(algorithms, "weights"):
            states *= 2
        length = tokens // max(shapes.samples, 1)
        probabilities = _probabilities(self._source, self._chosen, length, self._dtype)
        return (
            self._in_front * self._dtype.itemsize
            + int(shapes.block + codes)
            + states
            + more.memory
            + probabilities
        )


def _text(model: PreTrainedModel) -> Any:
    """Return the configuration of the language model within a model."""
    return getattr(model.config, "text_config", None) or model.config


def _whole(config: Any, name: str) -> int:
    """Return a size in a configuration; 0 if it is missing, or differs between layers."""
    value = getattr(config, name, 0)
    return value if isinstance(value, int) else 0


def shapes_of(
    model: PreTrainedModel, chosen: Layers, tokens: int, samples: int
) -> Shapes:
    """Return the sizes on which the cost of algorithms and of running the model depends.

    Args:
        model: the empty model.
        chosen: the layers to quantize.
        tokens: number of calibration tokens.
        samples: number of calibration samples.
    """
    blocks = _block_parameters(model)
    # by identity, as parameters may be shared, and comparing tensors compares values
    inside = set(map(id, list(chain.from_iterable(blocks))))
    layers = dict[str, Any]()
    for name, (module, spec) in chosen.items():
        weight = module.weight
        is_matrix = id(weight) in inside and weight.ndim > 1
        if spec.weight is not None and is_matrix:
            layers[name] = tuple(
                outputs_first(weight, kind_of(module)).flatten(1).shape
            )
    block = max(map(_count, blocks), default=0) * dtype_of(model.config).itemsize
    config = _text(model)
    heads = _whole(config, "num_attention_heads")
    # families such as Gemma have heads wider than hidden_size / num_attention_heads
    width = _whole(config, "head_dim") or _whole(config, "hidden_size") // max(1, heads)
    head = None
    if hasattr(model, "get_output_embeddings"):
        head = model.get_output_embeddings()
    head_weight = getattr(head, "weight", None)
    shares = _shares(model, layers)
    return Shapes(
        layers,
        sum(map(_count, blocks)),
        block,
        tokens,
        samples,
        attention=heads * width * len(blocks),
        head=0 if head_weight is None else head_weight.numel(),
        vocabulary=0 if head_weight is None else len(head_weight),
        shares=shares,
        idle=_idle(layers, shares),
    )


def _shares(model: PreTrainedModel, layers: Iterable[str]) -> dict[str, float]:
    """Return the share of the tokens that reach the parents of layers, for experts.

    Args:
        model: the empty model.
        layers: names of the layers to quantize.

    Returns:
        Shares between 0 and 1 by the name of a layer's parent module. Modules outside of expert
        stacks are missing, as all tokens reach them; all are missing if the configuration does not
        give the number of active experts.
    """
    config = _text(model)
    named = (_whole(config, name) for name in _ACTIVE)
    stacks = token_shares(model, next(filter(None, named), 0))
    shares = dict[str, float]()
    for layer in layers:
        parent = layer.rpartition(".")[0]
        # an expert is a module in the stack, or a layer itself
        for name in (parent, parent.rpartition(".")[0]):
            if name in stacks:
                # the share of all tokens that reach an expert, between 0 and 1
                shares[parent] = stacks[name]
    return shares


def _idle(layers: Mapping[str, tuple[int, int]], shares: Mapping[str, float]) -> int:
    """Return the number of weights of experts that an average token does not reach.

    Args:
        layers: (outputs, inputs) of each quantized matrix, by layer name.
        shares: shares of the tokens, by the name of the layer's parent, as ``_shares`` returns.

    Returns:
        The number of weights, rounded down; 0 for a model without experts.
    """
    idle = 0.0
    for name, (outputs, inputs) in layers.items():
        # layers outside of experts see every token
        share = shares.get(name.rpartition(".")[0], 1.0)
        idle += outputs * inputs * (1 - share)
    return int(idle)


def _probabilities(
    source: FloatCheckpoint,
    chosen: Layers,
    length: int,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of attention probabilities in a block, if they are quantized.

    Args:
        chosen: the layers to quantize.
        length: tokens of a sample.
        dtype: the model's dtype.
    """
    if all(spec.probabilities is None for _, spec in chosen.values()):
        return 0
    heads = _whole(_text(source.model), "num_attention_heads")
    # samples that a block runs at once
    rows = max(1, AT_ONCE // max(length, 1))
    # probabilities are (rows, heads, length, length); softmax computes them in float32
    return int(heads * rows * length**2 * (3 * dtype.itemsize + _SOFTMAX))


def _work(
    speed: Speed, cost: Cost, spec: TensorSpec | None, dtype: torch.dtype, width: int
) -> float:
    """Return the runtime of work in seconds.

    Args:
        speed: speed of the machine.
        spec: format of the weights that are rounded; None if none are.
        dtype: type of products.
        width: values of a hidden state.
    """
    seconds = 0.0
    if cost.products:
        seconds += cost.products / speed.products(dtype)
    # each probe runs only where its number is needed
    if cost.roundings and spec is not None:
        seconds += cost.roundings / speed.roundings(spec, dtype)
    if cost.columns:
        seconds += cost.columns / speed.columns()
    if cost.operators:
        seconds += cost.operators * speed.operator(width, dtype)
    if cost.elements:
        seconds += cost.elements / speed.elements()
    return seconds


def _block_parameters(model: PreTrainedModel) -> list[list[Any]]:
    """Return the parameters of each block."""
    return [list(block.parameters()) for block in blocks_of(model).values()]


def _count(parameters: Iterable[Any]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _in_front(source: FloatCheckpoint, blocks: list[list[Any]]) -> list[Any]:
    """Return the parameters outside of the blocks, without those of heads.

    Heads are not run.

    Args:
        source: the checkpoint, with the names of its heads.

    Returns:
        Parameters in the order of the model. The weight of the embedding is among them also where
        a head is tied to the embedding.
    """
    model = source.model
    modules = map(model.get_submodule, source.heads)
    heads = set(
        map(id, [parameter for head in modules for parameter in head.parameters()])
    )
    embedding = embedding_of(model)
    if embedding is not None:
        # a tied head has the weight of the embedding, which is run
        heads -= set(map(id, embedding.parameters()))
    others = heads | set(map(id, list(chain.from_iterable(blocks))))
    return [
        parameter for parameter in model.parameters() if id(parameter) not in others
    ]


def _weight(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight of ``_COLUMNS`` inputs.

    Args:
        rows: number of outputs.

    Returns:
        A matrix of shape (rows, ``_COLUMNS``) with equally spaced values from -1 to 1.
    """
    # not random: the probe must not advance the generator of the caller
    values = torch.linspace(-1, 1, rows * _COLUMNS)
    return values.reshape(rows, _COLUMNS).to(dtype)


def _laid_out(weight: torch.Tensor, spec: TensorSpec) -> int:
    """Return the bytes of the codes and scales of a weight."""
    return sum(tensor.nbytes for tensor in stored(quantize(weight, spec)).values())


class Speed:
    """Speed of this machine, measured by short probes when it is first asked for.

    Other work on the machine slows single runs of a probe down, and makes threads wait for each
    other. Each probe therefore runs several times, and the fastest run counts. Further runs on
    one thread count by the time on a processor, which other work does not take part in.

    Args:
        source: the checkpoint whose files are read.
    """

    def __init__(self, source: FloatCheckpoint) -> None:
        self._source = source
        self._known: dict[tuple[object, ...], float] = {}

    def _once(self, key: tuple[object, ...], measure: Callable[[], float]) -> float:
        # probes take a fraction of a second each, and a run asks for the same numbers again
        if key not in self._known:
            self._known[key] = measure()
        return self._known[key]

    def products(self, dtype: torch.dtype) -> float:
        """Return the multiply-accumulates per second."""
        return self._once(("products", dtype), lambda: _product_rate(dtype))

    def operator(self, width: int, dtype: torch.dtype) -> float:
        """Return the runtime of an elementwise operator on the hidden states of a batch.

        Args:
            width: values of the hidden state of a token.
            dtype: the model's dtype.

        Returns:
            Seconds per operator on a tensor of shape (``BATCH_TOKENS``, width).
        """
        key = ("operator", width, dtype)
        return self._once(key, lambda: _operator_seconds(width, dtype))

    def elements(self) -> float:
        """Return the values per second that an operator computes in float64."""
        return self._once(("elements",), _element_rate)

    def roundings(self, spec: TensorSpec, dtype: torch.dtype) -> float:
        """Return the number of weights per second that are rounded and packed.

        Args:
            spec: format of the weight.
            dtype: dtype of the float weight.
        """
        key = ("roundings", spec, dtype)
        return self._once(key, lambda: _rounding_rate(spec, dtype))

    def columns(self) -> float:
        """Return the number of columns per second of a sweep over short columns."""
        return self._once(("columns",), _column_rate)

    def reading(self) -> float:
        """Return the bytes per second read from the checkpoint.

        Writing is assumed to be as fast, up to ``_WRITTEN``.
        """
        return self._once(("reading",), lambda: _reading_rate(self._source))


def _seconds(work: Callable[[], object]) -> float:
    """Return the runtime of the fastest of several runs, after a warm-up.

    The warm-up may wait for memory.

    Args:
        work: the probe, called without arguments; its result is dropped.

    Returns:
        Seconds, at least ``_SHORTEST``: the lesser of the processor time on one thread and the
        elapsed time on all threads.
    """
    # one thread first: its processor time is free of the work of others
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work()
        found = [_fastest(work, time.thread_time)]
    finally:
        torch.set_num_threads(threads)
    if threads > 1:
        work()
    found.append(_fastest(work, time.perf_counter))
    # a coarse clock says 0
    return max(min(filter(None, found), default=0.0), _SHORTEST)


def _fastest(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the runtime of the fastest run by a clock.

    At most ``_MOST`` runs are made, and no further run starts after ``_BUDGET`` seconds.

    Args:
        work: the probe.
        clock: returns the current time in seconds: elapsed time, or processor time of the thread.
    """
    least, until = float("inf"), time.perf_counter() + _BUDGET
    for _ in range(_MOST):
        start = clock()
        work()
        least = min(least, clock() - start)
        # at least one run, however slow
        if time.perf_counter() > until:
            break
    return least


def _product_rate(dtype: torch.dtype) -> float:
    weight = torch.ones(_ROWS, _COLUMNS, dtype=dtype)
    x = torch.ones(_TOKENS, _COLUMNS, dtype=dtype)
    return float(_TOKENS * weight.numel()) / _seconds(
        # the range of the output, as observers ask for it after each layer
        lambda: torch.aminmax(torch.nn.functional.linear(x, weight)),
    )


def _operator_seconds(width: int, dtype: torch.dtype) -> float:
    states = torch.ones(BATCH_TOKENS, width, dtype=dtype)
    return _seconds(lambda: torch.nn.functional.silu(states))


def _element_rate() -> float:
    values = torch.ones(_SOME, _COLUMNS, dtype=torch.float64)
    return float(values.numel()) / _seconds(values.exp)


def _rounding_rate(spec: TensorSpec, dtype: torch.dtype) -> float:
    weight = _weight(_ROWS, dtype)
    return float(weight.numel()) / _seconds(lambda: _laid_out(weight, spec))


def _column_rate() -> float:
    weight = torch.linspace(-1, 1, _SOME * _SWEPT).reshape(_SOME, _SWEPT)
    # any format will do: a step over short columns has a constant runtime
    steps = TensorLevels.of(quantize(weight, TensorSpec("int8")))
    solver = Solver.of(torch.eye(_SWEPT))
    assert steps is not None
    return _SWEPT / _seconds(lambda: solver.quantize(weight, [steps]))


def _reading_rate(source: FloatCheckpoint) -> float:
    """Return the bytes per second read from the largest file of a checkpoint.

    The median of several parts counts, since the system may hold one of them in memory. Waiting for
    the disk counts, waiting for a processor does not.
    """
    file: Path = max(
        tensor_files(source.reader),
        key=lambda each: each.stat().st_size,
    )
    rates = list[float]()
    with file.open("rb", buffering=0) as opened:
        for _ in range(_PARTS):
            # unbuffered, so that each read is one call of the system
            start = time.perf_counter() - _waited_for_processor()
            count = len(opened.read(_READ))
            if count:
                seconds = time.perf_counter() - _waited_for_processor() - start
                rates.append(count / max(seconds, _SHORTEST))
    return statistics.median(rates)


def _waited_for_processor() -> float:
    """Return the seconds for which this thread was ready to run, but other work ran; 0 if unknown.

    Linux counts them, in nanoseconds, as the second number of a thread's schedstat.
    """
    try:
        return int(_SCHEDULED.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # another system
        return 0.0
