"""simulate: bit-exact simulation of an integer engine with power-of-two scales.

Between a DequantizeLinear and the next QuantizeLinear every number is an integer with a position
(``integers/fixed.py``), so that rounding happens only where the model rounds. There the integer is
shifted to the position of the codes, rounded, and saturated. The positions are those of the model.
The arithmetic of each operator cites its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper

from quark_onnx.common.errors import ConfigError, DataError, nearest
from quark_onnx.files.io import load
from quark_onnx.graph import Graph, Node, gather_constants
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.graph.traversal import reach
from quark_onnx.measuring.open_data import check_sample
from quark_onnx.npu.integers import (
    OPERATORS,
    Fixed,
    NodeCall,
    Real,
    Rounding,
    Value,
    exact,
    rounded,
)
from quark_onnx.npu.integers.call import reals
from quark_onnx.npu.named import producers_of
from quark_onnx.targets.pairs import PairParameters, Pairs
from quark_onnx.targets.scales import grid_findings

Array = NDArray[Any]
Exactly = Literal["exact", "dpu"]
Softmaxes = Literal["float", "dpu"]

#: Rules of the checker that a grid must keep to have a position.
_POSITION = ("S1", "S3", "S4")


@dataclass(frozen=True)
class Simulation:
    """Results of a simulation.

    Attributes:
        codes: codes of every rounded tensor, by the output name of its QuantizeLinear.
        outputs: the model's outputs, or the tensor ``until``; float32 if they are not integers.
        inexact: names of codes whose values were computed in float64 (a softmax, a sigmoid) and may
            differ from the engine's.
    """

    codes: dict[str, Array]
    outputs: dict[str, Array]
    inexact: tuple[str, ...]


def simulate(  # noqa: PLR0913
    model: str | Path | ModelProto,
    feeds: Mapping[str, Array],
    rounding: Rounding = "even",
    *,
    average: Exactly = "exact",
    gate: Exactly = "exact",
    softmax: Softmaxes = "float",
    codes: Mapping[str, Array] | None = None,
    until: str = "",
) -> Simulation:
    """Run a model on integers.

    Args:
        model: a path or a model, with Q/DQ pairs of any tool whose scales are powers of two.
        feeds: a value for each input, as for onnxruntime. A QuantizeLinear of an input stays on the
            CPU (Ryzen AI documentation 1.8, 2026-07-23, inst.rst), and rounds ties to even
            regardless of ``rounding``.
        rounding: rounding of ties: "even" as in QuantizeLinear, or "up" as in the engine. With
            "even", products with a float constant (a slope, the sixth of a HardSigmoid) are those
            of float32, so that they are ties where onnxruntime has ties.
        average: "exact", or "dpu" for the engine's product and shift instead of a division.
        gate: "exact", or "dpu" for 2731 / 2**14 instead of 1/6 in a HardSigmoid of slope 1/6.
        softmax: "float", or "dpu" for powers by a polynomial that is rounded to bfloat16 after each
            step, as an option of amd-quark 0.13 documents (simulate_dpu_softmax.py).
        codes: codes that replace simulated codes as inputs of operators, by the names in
            ``Simulation.codes``. With all codes of another machine, each tensor is simulated
            from its inputs alone.
        until: name of the last tensor to compute, with its dependencies; empty for all outputs.

    Returns:
        Codes and outputs.

    Raises:
        ConfigError: a setting or a name is unknown.
        DataError: the feeds or codes do not fit the model.
        ModelError: the model cannot be read, has other scales, or has unsupported operators; the
            message names the node.

    >>> from onnx import parser
    >>> text = '''<ir_version: 9, opset_import: ["": 17]> g (float[3] x) => (float[3] y)
    ...     <float s = {0.5}, float t = {1.0}, int8 z = {0}> {
    ...         q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) r = Relu (d)
    ...         c = QuantizeLinear (r, t, z) y = DequantizeLinear (c, t, z) }'''
    >>> found = simulate(parser.parse_model(text), {"x": np.float32([-1, 0.5, 100])}, "up")
    >>> found.codes["q"], found.codes["c"]
    (array([ -2,   1, 127], dtype=int8), array([ 0,  1, 64], dtype=int8))
    """
    simulator = Simulator(model, rounding, average=average, gate=gate, softmax=softmax)
    return simulator.run(feeds, codes=codes, until=until)


class Simulator:
    """A model on integers for many samples, which is read and checked once."""

    def __init__(
        self,
        model: str | Path | ModelProto,
        rounding: Rounding = "even",
        *,
        average: Exactly = "exact",
        gate: Exactly = "exact",
        softmax: Softmaxes = "float",
    ) -> None:
        """Read a model.

        Args:
            model: as for ``simulate``.
            rounding: as for ``simulate``.
            average: as for ``simulate``.
            gate: as for ``simulate``.
            softmax: as for ``simulate``.

        Raises:
            ConfigError: a setting is unknown.
            ModelError: the model cannot be read.
        """
        operators = {"average": average, "gate": gate, "softmax": softmax}
        kinds = {
            "rounding": Rounding,
            "average": Exactly,
            "gate": Exactly,
            "softmax": Softmaxes,
        }
        for option, value in {"rounding": rounding, **operators}.items():
            if value not in (known := get_args(kinds[option])):
                raise ConfigError(
                    f"{option} is {value!r}; it is one of {', '.join(map(repr, known))}",
                )
        # Only now, as a misspelled option should not cost the time of a large model.
        self._graph = Graph.of(load(model))
        gather_constants(self._graph, keep_inputs=True)
        self._pairs = Pairs(self._graph)
        self._rounding = rounding
        self._engine = frozenset(
            name for name, value in operators.items() if value == "dpu"
        )
        self._weights = dict[str, Value]()

    def run(
        self,
        feeds: Mapping[str, Array],
        *,
        codes: Mapping[str, Array] | None = None,
        until: str = "",
    ) -> Simulation:
        """Run the model on a sample.

        Args:
            feeds: as for ``simulate``.
            codes: as for ``simulate``.
            until: as for ``simulate``.

        Raises:
            ConfigError: a name is unknown.
            DataError: the feeds or codes do not fit the model.
            ModelError: the model has other scales, or unsupported operators.
        """
        check_sample(self._graph, feeds)
        run = _Run(
            self._graph,
            self._pairs,
            self._rounding,
            self._engine,
            dict(codes or {}),
            self._weights,
        )
        wanted = [until] if until else [output.name for output in self._graph.outputs]
        return run.of(wanted, feeds)


class _Run:
    """A simulation in progress, with the values that are computed so far."""

    def __init__(  # noqa: PLR0913
        self,
        graph: Graph,
        pairs: Pairs,
        rounding: Rounding,
        engine: frozenset[str],
        codes: dict[str, Array],
        weights: dict[str, Value],
    ) -> None:
        """Prepare a run.

        Args:
            weights: dequantized constants of earlier runs, to which this one adds its own.
        """
        self._graph, self._pairs = graph, pairs
        self._rounding, self._engine, self._given = rounding, engine, codes
        self._weights = weights
        self._values: dict[str, Value] = dict(weights)
        self._codes: dict[str, Array] = {}
        self._inexact: list[str] = []
        # Only codes of QuantizeLinear are replaced: all other values follow from codes.
        written = [node.outputs[0] for node in self._pairs.quantizing]
        unknown = [name for name in codes if name not in written]
        if unknown:
            raise ConfigError(
                f"codes are given for {unknown[0]!r}, which no QuantizeLinear"
                f" writes{nearest(unknown[0], written)}",
            )

    def of(self, wanted: list[str], feeds: Mapping[str, Array]) -> Simulation:
        """Compute the wanted tensors."""
        graph = self._graph
        # Nodes behind ``until`` may be unsupported, and are not computed.
        needed = reach(producers_of(graph, wanted), graph.leaders)
        for value in graph.inputs:
            # Inputs that only other nodes read need no value.
            if any(reader in needed for reader in graph.consumers(value.name)):
                self._values[value.name] = self._feed(value.name, feeds)
        for node in graph.nodes:
            if node in needed and node.outputs[0] not in self._weights:
                self._compute(node)
        outputs = {name: self._result(name) for name in wanted}
        return Simulation(self._codes, outputs, tuple(self._inexact))

    def _feed(self, name: str, feeds: Mapping[str, Array]) -> Value:
        """Return the value of an input: floats as float64, other arrays as they are.

        Raises:
            DataError: the input has no value, or a value that is not finite.
        """
        if name not in feeds:
            raise DataError(f"the input {name!r} has no value{nearest(name, feeds)}")
        array = np.asarray(feeds[name])
        # Integer inputs are indices or sizes, or images that a Cast reads.
        if array.dtype.kind != "f":
            return array
        if not np.isfinite(array).all():
            raise DataError(
                f"the input {name!r} holds values that are infinite or no numbers; give"
                " finite ones",
            )
        # float32 converts to float64 exactly.
        return Real(array.astype(np.float64), given=True)

    def _result(self, name: str) -> Array:
        """Return a computed tensor as an array: integers and booleans as they are, else float32."""
        value = self._values[name]
        if isinstance(value, np.ndarray):
            return value
        return reals(value).astype(np.float32)

    def _compute(self, node: Node) -> None:
        """Compute the results of a node from values that are known.

        Raises:
            ModelError: the node cannot be simulated, or an integer does not fit.
        """
        inputs = tuple(map(self._read, node.inputs))
        single = self._rounding == "even"
        call = NodeCall(self._graph, node, inputs, self._engine, single)
        try:
            results = self._results(call)
        # Raised where an exact integer would need more than 60 bits.
        except OverflowError as error:
            raise call.refused(str(error)) from error
        self._values.update(zip(node.results, results, strict=True))
        if node.op_type in DEQUANTIZE and self._graph.is_constant(node.inputs[0]):
            self._weights[node.outputs[0]] = results[0]

    def _read(self, name: str) -> Value | None:
        """Return the value of an input: computed, given or constant; None if omitted."""
        if not name:
            return None
        if name in self._values:
            return self._values[name]
        return self._graph.constant(name)

    def _results(self, call: NodeCall) -> list[Value]:
        """Return the results of a node by the arithmetic of its operator."""
        node = call.node
        if node.op_type in QUANTIZE:
            return [self._quantized(call)]
        if node.op_type in DEQUANTIZE:
            return [self._dequantized(call)]
        operator = OPERATORS.get(node.kind)
        # Before the table: shape arithmetic has no positions, and any operator may compute it.
        if all(value is None or isinstance(value, np.ndarray) for value in call.inputs):
            return list(call.evaluated({}))
        if operator is None:
            raise call.refused(f"no integer arithmetic is known here for {node.kind}")
        return operator(call)

    def _quantized(self, call: NodeCall) -> Value:
        """Return the codes of a QuantizeLinear, or the given ones in their place.

        Raises:
            DataError: given codes have another type or shape.
            ModelError: the scale has no position, or codes are no integers.
        """
        name, (grid, position) = call.node.outputs[0], self._grid(call)
        kind = np.dtype(helper.tensor_dtype_to_np_dtype(grid.elem_type))
        value = call.inputs[0]
        if kind.kind not in "iu":
            raise call.refused(f"its codes are {kind.name}")
        assert value is not None and grid.zero_point is not None
        # Saturation to the range of the type, as QuantizeLinear does.
        least, greatest = np.iinfo(kind).min, np.iinfo(kind).max
        zero = int(grid.zero_point.reshape(-1)[0])
        # An input of the model, or a sigmoid: its QuantizeLinear runs on a CPU, which rounds half
        # to even (ONNX), whatever the engine does.
        if isinstance(value, Real):
            nearest_code = np.rint(np.ldexp(value.values, position))
            whole = nearest_code.clip(least - zero, greatest - zero).astype(np.int64)
            if not (value.given or value.known):
                self._inexact.append(name)
        else:
            whole = rounded(exact(value), position, self._rounding)
        # Operations on arrays of rank 0 return scalars.
        codes = np.asarray((whole + zero).clip(least, greatest), kind)
        self._codes[name] = codes
        # Given codes replace the inputs of later nodes, and ``self._codes`` keeps the simulated
        # ones.
        given = self._given.get(name, codes)
        if given.shape != codes.shape or given.dtype != codes.dtype:
            raise DataError(
                f"the codes given for {name!r} are {given.dtype.name} of shape"
                f" {given.shape}, and {codes.dtype.name} of {codes.shape} here",
            )
        return given

    def _dequantized(self, call: NodeCall) -> Value:
        """Return codes less their zero point, at the position of the scale."""
        codes, (grid, position) = call.known(0), self._grid(call)
        assert grid.zero_point is not None
        zero = int(grid.zero_point.reshape(-1)[0])
        return Fixed(codes.astype(np.int64) - zero, position)

    def _grid(self, call: NodeCall) -> tuple[PairParameters, int]:
        """Return the grid of a Q or DQ node, and its position."""
        grid = self._pairs.grid(call.node)
        position = grid.position
        # A scale without a position cannot be simulated; the checker's text says which rule is
        # broken.
        for finding in grid_findings(call.node, grid):
            if finding.rule in _POSITION:
                raise call.refused(str(finding))
        assert position is not None
        return grid, position
