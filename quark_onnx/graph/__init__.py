"""Index, edit, read and write ONNX graphs."""

from quark_onnx.graph.channels import channels_last
from quark_onnx.graph.constants import (
    constants_of,
    describe_closed,
    gather_constants,
    overridable,
    scopes_of,
    store_constants,
)
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.model_key import model_key
from quark_onnx.graph.node import Node
from quark_onnx.graph.parameters import add_parameter
from quark_onnx.graph.shape_arithmetic import ShapeArithmetic
from quark_onnx.graph.store import Store, store_for
from quark_onnx.graph.tensor_keys import tensor_keys
from quark_onnx.graph.traversal import reach

__all__ = [
    "Graph",
    "Node",
    "ShapeArithmetic",
    "Store",
    "add_parameter",
    "channels_last",
    "constants_of",
    "describe_closed",
    "gather_constants",
    "model_key",
    "overridable",
    "reach",
    "scopes_of",
    "store_constants",
    "store_for",
    "tensor_keys",
]
