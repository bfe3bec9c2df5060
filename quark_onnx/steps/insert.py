"""insert: write the plan into the graph. The only place where QuantizeLinear and DequantizeLinear nodes are born."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from calibrators import QParams, quantize
from quark_onnx.dtypes import INT32, DType
from quark_onnx.graph import Graph, Node
from quark_onnx.plan import BiasOf, Keep, Plan, Quantize, Use
from quark_onnx.steps.solve import Params

_CONTRIB = "com.microsoft"


@dataclass(frozen=True)
class _Scale:
    """Scale and zero point as they stand in the graph."""

    dtype: DType
    params: QParams
    scale: str
    zero_point: str


def insert(graph: Graph, plan: Plan, params: Params) -> Graph:
    """A copy of ``graph`` in which every planned tensor passes through a Q/DQ pair or is stored quantized.

    An activation gets one pair, which everybody reads; a reader with an entry of its own gets a second pair behind it.
    A graph output keeps its name. A Relu or Clip that saturation makes superfluous is dropped.
    """
    writer = _Writer(graph, plan, params)
    writer.drop_clipping()
    writer.write_all()
    writer.graph.drop_unused()
    return writer.graph


def insert_live(graph: Graph, plan: Plan, params: Params, live: Iterable[Use]) -> tuple[Graph, dict[Use, str]]:
    """Like ``insert``, but the scales of the uses in ``live`` are inputs of the graph, by the names returned.

    Their constants stay float and are quantized as the graph runs; biases stay float.
    """
    writer = _LiveWriter(graph, plan, params, live)
    writer.write_all()
    writer.graph.drop_unused()
    return writer.graph, writer.names


class _Writer:
    def __init__(self, graph: Graph, plan: Plan, params: Params) -> None:
        self.graph = graph.copy()
        self.plan = plan
        self.params = params
        self._scales: dict[Use, _Scale] = {}
        self._nodes = {node.name: node for node in self.graph.nodes}

    def write_all(self) -> None:
        """Write every entry of the plan."""
        own: dict[str, list[Use]] = {}
        for use in self.plan.entries:
            own.setdefault(use.tensor, []).append(use)
        for tensor, uses in own.items():
            self._write(tensor, sorted(uses, key=lambda use: use.node is not None))

    def drop_clipping(self) -> None:
        """Drop each Relu and Clip whose bounds coincide with the ends of the grid that follows."""
        for node in self.graph.nodes:
            if node.kind not in ("Relu", "Clip") or node.name in self.plan.kept:
                continue
            producer, source, result = self.graph.producer(node.inputs[0]), node.inputs[0], node.outputs[0]
            alone = self.graph.consumers(source) == [node] and not self.graph.is_output(source)
            fused = isinstance(self.plan.entries.get(Use(source)), Keep)
            if producer and alone and fused and self._saturates(node, Use(result)):
                self.graph.remove([node])
                self.graph.set_output(producer, producer.outputs.index(source), result)

    def _saturates(self, node: Node, use: Use) -> bool:
        entry = self.plan.entries.get(use)
        bounds = _clip_bounds(self.graph, node)
        if not isinstance(entry, Quantize) or bounds is None:
            return False
        grid = entry.spec.dtype.grid(symmetric=entry.spec.symmetric)
        low, high = quantize(np.array(bounds), self.params.table[use], grid)
        return bool(low == grid.qmin and high == grid.qmax)

    def _write(self, tensor: str, uses: list[Use]) -> None:
        """Quantize one tensor: for everybody first, then for the readers with an entry of their own."""
        constant = self.graph.is_constant(tensor)
        readers = self._readers(tensor, uses)
        value = quantized = self._release(tensor, uses)
        for use in uses:
            root = self.plan.root(use)
            if isinstance(self.plan.entries.get(root, Keep("")), Keep):
                result = value
            elif constant:
                result = self._constant(tensor, use, root)
            else:
                result = self._pair(
                    quantized, use, self._scale(root), tensor if value != tensor and not use.node else ""
                )
            if use.node is None:
                quantized = result
            for node in readers[use]:
                for index, name in enumerate(node.inputs):
                    if name == tensor:
                        self.graph.set_input(node, index, result)

    def _readers(self, tensor: str, uses: list[Use]) -> dict[Use, list[Node]]:
        """Who reads the tensor under which use."""
        own = {use.node for use in uses}
        everybody = [node for node in self.graph.consumers(tensor) if node.name not in own]
        return {
            use: everybody if use.node is None else [self._nodes[use.node]] * (use.node in self._nodes) for use in uses
        }

    def _release(self, tensor: str, uses: list[Use]) -> str:
        """The name of the float value: another one for a graph output, whose name DQ takes over."""
        producer = self.graph.producer(tensor)
        quantized = uses[0].node is None and isinstance(self.plan.entry(uses[0]), Quantize)
        if producer is None or not quantized or not self.graph.is_output(tensor):
            return tensor
        name = self.graph.fresh(f"{tensor}_float")
        self.graph.set_output(producer, producer.outputs.index(tensor), name)
        return name

    def _pair(self, source: str, use: Use, scale: _Scale, result: str = "") -> str:
        """Append Q and DQ to a tensor; the name of what DQ computes, ``result`` if it is given."""
        codes = self.graph.fresh(f"{use_name(use)}_quantized")
        result = result or self.graph.fresh(f"{use_name(use)}_dequantized")
        self._node("QuantizeLinear", [source, scale.scale, scale.zero_point], codes, use, scale)
        self._node("DequantizeLinear", [codes, scale.scale, scale.zero_point], result, use, scale)
        return result

    def _constant(self, tensor: str, use: Use, root: Use) -> str:
        """Store a constant as codes with a DQ behind them; the name of what DQ computes."""
        array = self.graph.constant(tensor)
        assert array is not None
        scale = self._scale(root)
        entry = self.plan.entries[root]
        grid = entry.spec.grid if isinstance(entry, Quantize) else INT32.grid(symmetric=True)
        codes = quantize(array, scale.params, grid).astype(scale.dtype.numpy)
        name = self.graph.add_constant(f"{use_name(use)}_quantized", codes, scale.dtype.onnx)
        result = self.graph.fresh(f"{use_name(use)}_dequantized")
        self._node("DequantizeLinear", [name, scale.scale, scale.zero_point], result, use, scale)
        return result

    def _scale(self, root: Use) -> _Scale:
        """The scale and zero point of a root, written once."""
        if root not in self._scales:
            entry, params = self.plan.entries[root], self.params.table[root]
            dtype = entry.spec.dtype if isinstance(entry, Quantize) else INT32
            zero = self.graph.add_constant(
                f"{use_name(root)}_zero_point", params.zero_point.astype(dtype.numpy), dtype.onnx
            )
            self._scales[root] = _Scale(dtype, params, self._store(root, params), zero)
        return self._scales[root]

    def _store(self, root: Use, params: QParams) -> str:
        """Write the scale of a root; its name."""
        return self.graph.add_constant(f"{use_name(root)}_scale", params.scale)

    def _node(self, op_type: str, inputs: list[str], output: str, use: Use, scale: _Scale) -> None:
        standard = self.graph.opset >= max(scale.dtype.min_opset, 13 if scale.params.axis is not None else 0)
        domain = "" if standard else _CONTRIB
        if domain:
            self.graph.import_domain(domain)
        axis = {} if scale.params.axis is None else {"axis": scale.params.axis}
        self.graph.add(op_type, inputs, [output], name=f"{use_name(use)}_{op_type}", domain=domain, **axis)


class _LiveWriter(_Writer):
    def __init__(self, graph: Graph, plan: Plan, params: Params, live: Iterable[Use]) -> None:
        super().__init__(graph, plan.without(BiasOf), params)
        self.names = dict.fromkeys(live, "")

    def _store(self, root: Use, params: QParams) -> str:
        if root not in self.names:
            return super()._store(root, params)
        self.names[root] = self.graph.add_input(f"{use_name(root)}_scale", TensorProto.FLOAT, params.scale.shape)
        return self.names[root]

    def _constant(self, tensor: str, use: Use, root: Use) -> str:
        if root not in self.names:
            return super()._constant(tensor, use, root)
        return self._pair(tensor, use, self._scale(root))


def use_name(use: Use) -> str:
    """The stem of the names that belong to a use."""
    return use.tensor if use.node is None else f"{use.tensor}_{use.node}"


def _clip_bounds(graph: Graph, node: Node) -> tuple[float, float] | None:
    """The interval that a Relu or Clip lets through; None if it is not constant."""
    if node.kind == "Relu":
        return 0.0, float("inf")
    bounds = [node.attribute("min", -np.inf), node.attribute("max", np.inf)]
    for place, name in enumerate(node.inputs[1:3]):
        if name:
            value = graph.constant(name)
            if value is None:
                return None
            bounds[place] = float(value.reshape(-1)[0])
    return bounds[0], bounds[1]
