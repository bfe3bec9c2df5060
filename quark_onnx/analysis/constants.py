"""Constants of a graph, stored or computed, and their values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators.onnx_runtime.session import open_session
from quark_onnx.common.errors import ModelError
from quark_onnx.graph import Graph
from quark_onnx.graph.codes import dequantized
from quark_onnx.graph.segment import segment
from quark_onnx.graph.traversal import reach

_RANDOM = ("Random", "Multinomial", "Bernoulli")


class Constants:
    """Constants of a graph: initializers, Constant nodes, and their results."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._computed: set[str] = set()
        # Bodies (If, Loop, Scan) may read outer tensors, and random operators have other values in
        # each run: neither is constant.
        for node in graph.nodes:  # in topological order
            free = node.has_subgraph or node.op_type.startswith(_RANDOM)
            if not free and all(self.known(name) for name in node.operands):
                self._computed.update(node.results)

    def known(self, tensor: str) -> bool:
        """Return True if a tensor is constant."""
        return tensor in self._computed or self.graph.is_constant(tensor)

    def value(self, tensor: str) -> NDArray[Any]:
        """Return the values of a constant tensor.

        Raises:
            ModelError: onnxruntime cannot compute the tensor.
        """
        stored = self.graph.constant(tensor)
        if stored is not None:
            return stored
        node = self.graph.producer_of_kind(tensor, {"DequantizeLinear"})
        # Most weights are Q/DQ constants: numpy dequantizes them without a session.
        if node is not None and all(
            self.graph.is_constant(name) for name in node.inputs
        ):
            return dequantized(node, [self.value(name) for name in node.inputs])
        return self._run(tensor)

    def _run(self, tensor: str) -> NDArray[Any]:
        """Compute a tensor by a model that contains only the required nodes.

        Args:
            tensor: a constant tensor that no initializer stores.

        Raises:
            ModelError: onnxruntime cannot compute the tensor.
        """
        # No node with a body is constant, so that all that is read are inputs.
        # All nodes upstream of the tensor, in no particular order; the model below takes them in
        # graph order.
        producer = self.graph.producer(tensor)
        nodes = reach([] if producer is None else [producer], self.graph.leaders)
        ordered = [node for node in self.graph.nodes if node in nodes]
        model = segment(self.graph, ordered, {}, [tensor])
        try:
            return np.asarray(open_session(model, threads=1).run([tensor], {})[0])
        except Exception as error:  # onnxruntime raises several unrelated types
            raise ModelError(
                f"the constant {tensor!r} cannot be computed: {error}",
            ) from error
