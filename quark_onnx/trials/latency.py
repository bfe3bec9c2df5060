"""Latency of a float and a quantized model, and reasons for slow integers."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from math import hypot
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, TensorProto

from calibrators.errors import RuntimeCrash
from calibrators.onnx_runtime.cpu_features import available_cores, saturates
from calibrators.onnx_runtime.session import feeds_of, open_session
from calibrators.onnx_runtime.turns import seconds_in_turns
from quark_onnx.common.errors import ModelError
from quark_onnx.common.wording import counted, tally
from quark_onnx.config.checks import require
from quark_onnx.engines import engine_title, selected
from quark_onnx.files.io import load
from quark_onnx.graph import Graph, Node, scopes_of
from quark_onnx.graph.codes import WORDS, written_type
from quark_onnx.graph.node import all_graphs, makers_of, nested_nodes
from quark_onnx.measuring.open_data import check_sample
from quark_onnx.patterns.slow_depthwise import describe_slow_depthwise
from quark_onnx.report.verdict.verdict import SLOWER
from quark_onnx.running.function_bodies import with_bodies

#: Maximum number of runs of each model, and their total time in seconds.
_RUNS, _SECONDS = 30, 1.0
#: Number of turns of each model.
_TURNS = 5
#: Minimum number of runs for quartiles.
_FEWEST = 4
#: Maximum distance of the quartiles, as a share of the median, on a machine that is not busy.
_STEADY = 0.2
#: Latency in milliseconds below which overhead dominates.
_TINY = 0.2
#: Minimum number of SiLU activations to report.
_MANY_SILU = 3

#: Operators that onnxruntime fuses with their Q/DQ pairs on the CPU, or that only move values
#: (qdq_selector_action_transformer.cc and the kernels of com.microsoft).
_FUSED = frozenset(
    {
        "Add",
        "ArgMax",
        "AveragePool",
        "Clip",
        "Concat",
        "Conv",
        "ConvTranspose",
        "DepthToSpace",
        "Dropout",
        "Expand",
        "Flatten",
        "Gather",
        "Gemm",
        "GlobalAveragePool",
        "Identity",
        "LeakyRelu",
        "MatMul",
        "MaxPool",
        "Mul",
        "Pad",
        "Relu",
        "Reshape",
        "Resize",
        "Sigmoid",
        "Slice",
        "Softmax",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
        "Where",
    },
)
_PAIR = ("QuantizeLinear", "DequantizeLinear")
#: Processors whose instructions multiply unsigned activations with signed weights (VPDPBUSD).
_UNSIGNED_FIRST = ("x86_64", "amd64")
_FOUR_BITS = {TensorProto.UINT4, TensorProto.INT4}


@dataclass(frozen=True)
class Latency:
    """Median latency of two models on this machine.

    Attributes:
        reference_ms: latency of the float model in milliseconds.
        other_ms: latency of the quantized model in milliseconds.
        threads: number of threads inside an operator.
        runs: number of runs of each model.
        reasons: reasons for a slower quantized model, with remedies; empty if it is not slower.
        reference_quartiles: first and third quartile of the float model's runs in milliseconds;
            None if unknown.
        other_quartiles: the same of the quantized model.
        engine: name and version of the engine; empty for onnxruntime on this CPU.
    """

    reference_ms: float
    other_ms: float
    threads: int
    runs: int
    reasons: tuple[str, ...] = ()
    reference_quartiles: tuple[float, float] | None = None
    other_quartiles: tuple[float, float] | None = None
    engine: str = ""

    @property
    def ratio(self) -> float:
        """Return the latency of the quantized model relative to the float model."""
        return self.other_ms / self.reference_ms if self.reference_ms else 1.0

    @property
    def scatter(self) -> float:
        """Return the share of the ratio by which repeated runs differ; 0 without quartiles."""
        if self.reference_quartiles is None or self.other_quartiles is None:
            return 0.0
        return hypot(
            _spread(self.reference_quartiles, self.reference_ms),
            _spread(self.other_quartiles, self.other_ms),
        )

    @property
    def is_overhead(self) -> bool:
        """Return whether most of the float model's latency is the overhead of a run."""
        return self.reference_ms < _TINY

    @property
    def doubt(self) -> str:
        """Return why the comparison is not meaningful, in words; empty if it is.

        The runs of a model scatter widely on a busy machine. They tell which model is faster only
        if the middle halves of the runs do not overlap.
        """
        reference, other = self.reference_quartiles, self.other_quartiles
        if reference is None or other is None:
            return ""
        scatter = max(
            _spread(reference, self.reference_ms), _spread(other, self.other_ms)
        )
        if scatter <= _STEADY:
            return ""
        # Two intervals overlap if each one begins before the other one ends.
        overlap = reference[0] <= other[1] and other[0] <= reference[1]
        if overlap:
            return (
                "the runs scatter so widely that the medians do not tell which model is"
                " faster: the machine is busy; measure again when it is idle"
            )
        return (
            "the runs scatter widely, so the ratio is rough: the machine is busy; measure"
            " again when it is idle"
        )

    @property
    def lines(self) -> list[str]:
        """Return the latencies, doubts about them, and reasons for a slower model."""
        doubts = [self.doubt] if self.doubt else []
        return [str(self), *doubts, *self.reasons]

    def __str__(self) -> str:
        ratio = self.reference_ms / self.other_ms if self.other_ms else 1.0
        if ratio >= 1:
            change = f"{ratio:.2f}x faster"
        else:
            change = f"{1 / ratio:.2f}x slower"
        threads = counted(self.threads, "thread")
        before = _shown(self.reference_ms, self.reference_quartiles)
        after = _shown(self.other_ms, self.other_quartiles)
        what = "median" if self.other_quartiles is None else "median and quartiles"
        return (
            f"float {before}, quantized {after} ({change}; {what} of {counted(self.runs, 'run')},"
            f" {threads}, {self.engine or 'this CPU'})"
        )


def _shown(middle: float, quartiles: tuple[float, float] | None) -> str:
    """Return a median with its quartiles.

    >>> _shown(3.0, None), _shown(3.0, (2.5, 4.25))
    ('3 ms', '3 ms [2.5 to 4.25]')
    """
    if quartiles is None:
        return f"{middle:.3g} ms"
    return f"{middle:.3g} ms [{quartiles[0]:.3g} to {quartiles[1]:.3g}]"


def _spread(quartiles: tuple[float, float], middle: float) -> float:
    """Return the distance of the quartiles as a share of the median, ``middle``."""
    # A clock of low resolution may give a median of 0.
    return (quartiles[1] - quartiles[0]) / max(middle, 1e-9)


def measure_latency(
    reference: str | Path | ModelProto,
    other: str | Path | ModelProto,
    sample: Mapping[str, NDArray[Any]],
    *,
    threads: int = 0,
) -> Latency:
    """Run two models in turn on a sample, with an application's default sessions.

    Both run in the engine that ``on_engine`` selects.

    Args:
        reference: the float model.
        other: the quantized model.
        sample: inputs by name.
        threads: number of threads inside an operator; 0 for all cores available to this process.

    Returns:
        The median latency of both models, with quartiles.

    Raises:
        ConfigError: the number of threads is negative.
        ModelError: a model cannot be loaded or run.
    """
    require(threads >= 0, "threads", threads, "0 or more")
    threads = threads or available_cores()
    quantized, floating = load(other), load(reference)
    for model in (floating, quantized):
        check_sample(Graph.of(model), sample)
    timed = [
        _Timed("reference", floating, sample, threads),
        _Timed("other", quantized, sample, threads),
    ]
    # The first run, which allocates memory, is slower than the measured ones: the total stays below
    # _SECONDS.
    slowest = max(1e-6, *(model.first_run for model in timed))
    runs = min(_RUNS, int(_SECONDS / 2 / slowest))
    # Equal turns of at least one run; a model that takes longer than half of _SECONDS runs once.
    turns = [max(1, runs // _TURNS)] * min(_TURNS, max(1, runs))
    reference_seconds, other_seconds = seconds_in_turns(
        [model.run for model in timed], turns
    )
    before, after = 1000 * median(reference_seconds), 1000 * median(other_seconds)
    slower = after > SLOWER * before
    # The reasons read the graph as it was written, before with_bodies expands operators of vendors.
    where = engine_title()
    # The reasons are those of onnxruntime's kernels for the CPU.
    why = tuple(reasons(quantized, before)) if slower and not where else ()
    return Latency(
        before,
        after,
        threads,
        sum(turns),
        why,
        _quartiles(reference_seconds),
        _quartiles(other_seconds),
        where,
    )


def _quartiles(seconds: Sequence[float]) -> tuple[float, float] | None:
    """Return first and third quartile in milliseconds; None for fewer than four runs."""
    # Quartiles of fewer runs are extrapolated or equal to single runs.
    if len(seconds) < _FEWEST:
        return None
    first, _, third = quantiles(seconds, n=4, method="inclusive")
    return 1000 * first, 1000 * third


class _Timed:
    """A model in a session, with the seconds of its first run."""

    def __init__(
        self,
        name: str,
        model: ModelProto,
        sample: Mapping[str, NDArray[Any]],
        threads: int,
    ) -> None:
        engine, what = selected(), f"the {name} model"
        library = "onnxruntime" if engine is None else engine.engine.name
        try:
            complete = with_bodies(model)
            if engine is None:
                self._session = open_session(
                    complete,
                    threads=threads,
                    # The kernels of an application on this processor, saturating sums included:
                    # accuracy does not matter here.
                    integers=True,
                    what=what,
                )
            else:
                self._session = engine.open(complete, threads=threads, what=what)
            self._feeds = feeds_of(self._session, sample)
            # onnxruntime allocates and packs weights in the first run, which is therefore not part
            # of the result.
            self.first_run: float = self._session.seconds(self._feeds, 1)[0]
        # The caller reports a crash with the model and the signal.
        except RuntimeCrash:
            raise
        except Exception as error:  # onnxruntime raises several unrelated types
            raise ModelError(
                f"the {name} model cannot be timed: {library} says {error}",
            ) from error

    def run(self, count: int) -> list[float]:
        """Return the seconds of every run."""
        seconds: list[float] = self._session.seconds(self._feeds, count)
        return seconds


def reasons(model: ModelProto, float_ms: float) -> Iterator[str]:
    """Yield reasons for a slower quantized model, with remedies.

    Args:
        model: the quantized model.
        float_ms: latency of the float model in milliseconds.
    """
    # 16 bits explain all operators at once, so that the reasons of single operators would only
    # repeat it.
    if _has_activations(model, WORDS):
        yield (
            "16-bit activations: onnxruntime has no integer kernels for them on the CPU,"
            " so each operator runs in float between its Q/DQ pairs; use them on an NPU,"
            " or --preset A8W8 here"
        )
    else:
        yield from _slow_operators(model)
    is_x86 = platform.machine().lower() in _UNSIGNED_FIRST
    if is_x86 and _has_activations(model, {TensorProto.INT8}):
        yield (
            "int8 activations: onnxruntime's kernels for this kind of processor are fast for"
            " uint8 activations; --preset A8W8"
        )
    if saturates():
        yield (
            "this processor has no VNNI, so that 8-bit products are hardly faster than"
            " float ones; time the model on the processor that it is for"
        )
    if float_ms < _TINY:
        yield (
            f"the float model takes {float_ms:.2g} ms, of which most is the overhead of a"
            " run: integers cannot make that shorter"
        )


def _slow_operators(model: ModelProto) -> Iterator[str]:
    """Yield reasons that lie in the operators of a model with 8-bit activations."""
    # Types of weights and zero points; a dequantized weight of 4 bits has an initializer of that
    # type.
    types = set[int]()
    for _, constants in scopes_of(model):
        types.update(tensor.data_type for tensor in constants.values())
    if types & _FOUR_BITS:
        yield (
            "4-bit weights: onnxruntime dequantizes those of convolutions in each run and"
            " computes in float on the CPU; they make the file small, --preset A8W8 makes"
            " it fast"
        )
    count = _dequantized_weights(model)
    if count:
        weights = counted(count, "weight is dequantized", "weights are dequantized")
        yield (
            f"{weights} in each run; session.disable_quant_qdq=1 in the application's"
            " session does it once, at load: the model is then as fast as float, with the"
            " memory of float weights"
        )
    if any(node.op_type == "ConvInteger" for node in nested_nodes(model.graph.node)):
        yield (
            "dynamic scales: each convolution finds the range of its input, rounds it and"
            " scales the result in operators of their own; calibrate with --preset A8W8"
        )
    depthwise = describe_slow_depthwise(model)
    if depthwise:
        yield depthwise
    unfused = _unfused(model)
    if unfused:
        kinds = tally(unfused.most_common(4))
        yield (
            f"Q/DQ pairs around operators without an integer kernel ({kinds}) are"
            " not fused and cost time; leave these operators float with --exclude"
            " or --op-types Conv MatMul Gemm"
        )
    silu = sum(map(_silu, all_graphs(model.graph)))
    if silu >= _MANY_SILU:
        yield (
            f"{silu} SiLU activations (Sigmoid and Mul) become two integer operators"
            " with requantization each; leave them float with --op-types Conv, or"
            " export the model with ReLU or HardSwish"
        )


def _dequantized_weights(model: ModelProto) -> int:
    """Count the DequantizeLinear nodes of constants in a model with float activations."""
    count = 0
    for graph, constants in scopes_of(model):
        for node in graph.node:
            if node.op_type == "QuantizeLinear":
                return 0
            count += node.op_type == "DequantizeLinear" and node.input[0] in constants
    return count


def _has_activations(model: ModelProto, kinds: Collection[int]) -> bool:
    """Return whether the codes of activations have one of the types."""
    writes = partial(_writes_codes, kinds)
    return any(starmap(writes, scopes_of(model)))


def _writes_codes(
    kinds: Collection[int],
    graph: GraphProto,
    constants: Mapping[str, TensorProto],
) -> bool:
    """Return whether a graph, without its bodies, quantizes an activation to one of the types.

    Args:
        kinds: the types of codes.
        constants: constants that its nodes can read, by name.
    """
    for proto in graph.node:
        if proto.op_type != "QuantizeLinear" or proto.input[0] in constants:
            continue
        if written_type(Node(proto), constants) in kinds:
            return True
    return False


def _unfused(model: ModelProto) -> Counter[str]:
    """Count unfused operators, which onnxruntime computes in float, by type."""
    kinds: Counter[str] = Counter()
    for graph in all_graphs(model.graph):
        kinds += _between_pairs(graph)
    for fused in _FUSED:
        del kinds[fused]  # a Counter ignores missing keys
    return kinds


def _between_pairs(graph: GraphProto) -> Counter[str]:
    """Count the operators between Q/DQ pairs of a graph by type, without those in bodies."""
    dequantized = set[str]()
    quantized = set[str]()
    for node in graph.node:
        if node.op_type == "DequantizeLinear":
            dequantized.update(node.output)
        elif node.op_type == "QuantizeLinear":
            quantized.update(node.input)
    kinds: Counter[str] = Counter()
    for node in graph.node:
        # An operator between a dequantization and a quantization runs in float, and both
        # conversions cost time. The first tensors are the data.
        follows = not dequantized.isdisjoint(node.input[:1])
        precedes = not quantized.isdisjoint(node.output[:1])
        if follows and precedes:
            kinds[node.op_type] += 1
    return kinds


def _silu(graph: GraphProto) -> int:
    """Count products with a Sigmoid in a graph, with or without a Q/DQ pair between."""
    producers = makers_of(graph.node)

    def is_gate(name: str) -> bool:
        node = producers.get(name)
        # Through the Q/DQ pairs of the gate, up to the operator that computes the gate.
        while node is not None and node.op_type in _PAIR:
            node = producers.get(node.input[0])
        return node is not None and node.op_type == "Sigmoid"

    products = [node for node in graph.node if node.op_type == "Mul"]
    return sum(any(map(is_gate, node.input)) for node in products)
