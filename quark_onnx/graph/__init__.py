"""ONNX graphs: an index over protobuf, the verbs that edit it, and files."""

from quark_onnx.graph.fixed import fixed
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.halves import Narrowing, add_narrow, widened
from quark_onnx.graph.inlined import inlined
from quark_onnx.graph.node import Node
from quark_onnx.graph.store import Store, store_for
from quark_onnx.graph.walk import reach

__all__ = ["Graph", "Narrowing", "Node", "Store", "add_narrow", "fixed", "inlined", "reach", "store_for", "widened"]
