"""insert: write the plan into the graph. The only place where QuantizeLinear and DequantizeLinear nodes are born."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibrators import QParams, quantize
from quark_onnx.dtypes import INT32, DType
from quark_onnx.graph import Graph, Node
from quark_onnx.plan import Keep, Plan, Quantize, SameAs, Use
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
    writer = _Writer(graph.copy(), plan, params)
    writer.drop_clipping()
    own: dict[str, list[Use]] = {}
    for use in plan.entries:
        own.setdefault(use.tensor, []).append(use)
    for tensor, uses in own.items():
        writer.write(tensor, sorted(uses, key=lambda use: use.node is not None))
    result = writer.graph
    result.drop_unused()
    return result


class _Writer:
    def __init__(self, graph: Graph, plan: Plan, params: Params) -> None:
        self.graph = graph
        self.plan = plan
        self.params = params
        self._scales: dict[Use, _Scale] = {}
        self._nodes = {node.name: node for node in graph.nodes}

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

    def write(self, tensor: str, uses: list[Use]) -> None:
        """Quantize one tensor: for everybody first, then for the readers with an entry of their own."""
        readers = {use.node for use in uses if use.node is not None}
        source = tensor
        for use in uses:
            entry = self.plan.entries[use]
            root = self.plan.root(use)
            if isinstance(self.plan.entries.get(root, Keep("")), Keep):
                continue
            if isinstance(entry, SameAs | Quantize) and not self.graph.is_constant(tensor):
                result = self._pair(source, use, self._scale(root))
                source = result if use.node is None else source
            else:
                result = self._constant(tensor, use, root)
            for node in self._readers(tensor, use, readers):
                for index, name in enumerate(node.inputs):
                    if name == tensor:
                        self.graph.set_input(node, index, result)

    def _readers(self, tensor: str, use: Use, others: set[str]) -> list[Node]:
        if use.node is not None:
            return [self._nodes[use.node]] if use.node in self._nodes else []
        return [
            node
            for node in self.graph.consumers(tensor)
            if node.name not in others and node.op_type != "QuantizeLinear"
        ]

    def _pair(self, tensor: str, use: Use, scale: _Scale) -> str:
        """Append Q and DQ to a tensor; the name of what DQ computes."""
        graph, source, result = self.graph, tensor, graph_name(use)
        if use.node is None and graph.is_output(tensor):
            producer = graph.producer(tensor)
            if producer is not None:  # DQ takes over the name of the output
                source, result = graph.fresh(f"{tensor}_float"), tensor
                graph.set_output(producer, producer.outputs.index(tensor), source)
            else:
                result = graph.fresh(result)
        else:
            result = graph.fresh(result)
        codes = graph.fresh(f"{use_name(use)}_quantized")
        self._node("QuantizeLinear", [source, scale.scale, scale.zero_point], codes, use, scale)
        self._node("DequantizeLinear", [codes, scale.scale, scale.zero_point], result, use, scale)
        return result

    def _constant(self, tensor: str, use: Use, root: Use) -> str:
        """Store a constant as codes with a DQ behind them; the name of what DQ computes."""
        array = self.graph.constant(tensor)
        assert array is not None
        scale = self._scale(root)
        spec_grid = self._grid(root)
        codes = quantize(array, scale.params, spec_grid).astype(scale.dtype.numpy)
        name = self.graph.add_constant(f"{use_name(use)}_quantized", codes, scale.dtype.onnx)
        result = self.graph.fresh(graph_name(use))
        self._node("DequantizeLinear", [name, scale.scale, scale.zero_point], result, use, scale)
        return result

    def _grid(self, root: Use):  # type: ignore[no-untyped-def]
        entry = self.plan.entries[root]
        return entry.spec.grid if isinstance(entry, Quantize) else INT32.grid(symmetric=True)

    def _scale(self, root: Use) -> _Scale:
        """The scale and zero point of a root, as initializers that are written once."""
        if root not in self._scales:
            entry, params = self.plan.entries[root], self.params.table[root]
            dtype = entry.spec.dtype if isinstance(entry, Quantize) else INT32
            scale = self.graph.add_constant(f"{use_name(root)}_scale", params.scale)
            zero = params.zero_point.astype(dtype.numpy)
            self._scales[root] = _Scale(
                dtype,
                params,
                scale,
                self.graph.add_constant(f"{use_name(root)}_zero_point", zero, dtype.onnx),
            )
        return self._scales[root]

    def _node(self, op_type: str, inputs: list[str], output: str, use: Use, scale: _Scale) -> None:
        standard = self.graph.opset >= max(scale.dtype.min_opset, 13 if scale.params.axis is not None else 0)
        domain = "" if standard else _CONTRIB
        if domain:
            self.graph.import_domain(domain)
        axis = {} if scale.params.axis is None else {"axis": scale.params.axis}
        self.graph.add(op_type, inputs, [output], name=f"{use_name(use)}_{op_type}", domain=domain, **axis)


def use_name(use: Use) -> str:
    """The stem of the names that belong to a use."""
    return use.tensor if use.node is None else f"{use.tensor}_{use.node}"


def graph_name(use: Use) -> str:
    return f"{use_name(use)}_dequantized"


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
