"""Graph: an ONNX model with every look-up in constant time, and the only verbs that change it.

Nodes and initializers live in Python containers; ``to_model`` writes them back into protobuf. Names
that the model uses anywhere, subgraphs included, are never given out again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import (
    FunctionProto,
    GraphProto,
    ModelProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from calibrators.onnx_runtime.external_tensors import values
from quark_onnx.errors import ModelError
from quark_onnx.graph.node import (
    STANDARD_DOMAINS,
    Node,
    all_names,
    name_apart,
    sparse_names,
)
from quark_onnx.graph.readers import Readers
from quark_onnx.graph.shapes import (
    infer_values,
    ir_version_for,
    open_negative_sizes,
    sizes_of,
)
from quark_onnx.graph.store import Store
from quark_onnx.graph.traversal import copy_fields, in_order

Shape = tuple["int | str | None", ...]

#: Constants above this size in bytes are not kept as arrays beside the model.
_LARGE = 1 << 18


class Graph:
    """The main graph of a model.

    Attributes:
        nodes: operators, in topological order when loaded.
        initializers: constant tensors by name.
        inputs, outputs: the interface, as the model declares it.
        sparse: names of sparse constants.
        store: where large constants go that are added, None for the memory.
    """

    def __init__(
        self,
        model: ModelProto,
        initializers: Iterable[TensorProto] | None = None,
        store: Store | None = None,
    ) -> None:
        """Takes over ``model``: hand in a copy (``Graph.of`` makes one).

        Args:
            model: the model, with its initializers or without.
            initializers: the tensors that the model lacks. They may be shared: a tensor is
                replaced, never written to.
            store: takes large constants that are added; None keeps them in memory.
        """
        graph = model.graph
        self._shell = model
        self.store = store
        graph.name = (
            graph.name or "graph"
        )  # onnx's checker wants one, onnxruntime does not
        open_negative_sizes(graph)
        self.nodes: list[Node] = [Node(proto) for proto in graph.node]
        tensors = graph.initializer if initializers is None else initializers
        self.initializers: dict[str, TensorProto] = {
            tensor.name: tensor for tensor in tensors
        }
        self.inputs: list[ValueInfoProto] = list(graph.input)
        self.outputs: list[ValueInfoProto] = list(graph.output)
        self._names = all_names(graph)
        self._values: dict[str, ValueInfoProto] = {
            value.name: value for value in graph.value_info
        }
        self.sparse = sparse_names(graph)
        self._arrays: dict[str, NDArray[Any]] = {}
        self._counter: Counter[str] = Counter()
        self._made: dict[tuple[str, ...], list[str]] = {}
        name_apart(self.nodes, self.fresh)
        self._index()
        if (
            model.ir_version < 4
        ):  # which wants every initializer among the inputs, although nobody feeds it
            self.close_inputs()
            model.ir_version = 4
        self._sort()
        self.infer()

    @classmethod
    def of(cls, model: ModelProto, store: Store | None = None) -> Graph:
        """The graph of a copy of ``model``; the weights are shared with it."""
        shell = ModelProto()
        copy_fields(model, shell, but="graph")
        copy_fields(model.graph, shell.graph, but="initializer")
        return cls(shell, model.graph.initializer, store)

    def copy(self) -> Graph:
        """An independent graph; the weights are shared."""
        copy = Graph(self._skeleton(), self.initializers.values(), self.store)
        copy.reserve(self._names)
        return copy

    # -- reading
    # ----------------------------------------------------------------------------------

    def producer(self, tensor: str) -> Node | None:
        """The node that computes a tensor; None for inputs, initializers and unknown names."""
        return self._producers.get(tensor)

    def consumers(self, tensor: str) -> list[Node]:
        """The nodes that read a tensor, also from inside their subgraphs.

        In graph order, each once.
        """
        return list(self._readers.of(tensor))

    def followers(self, node: Node) -> list[Node]:
        """The nodes that read what a node computes."""
        return list(
            dict.fromkeys(
                reader for output in node.outputs for reader in self.consumers(output)
            ),
        )

    def leaders(self, node: Node) -> list[Node]:
        """The nodes that compute what a node reads."""
        before = (self.producer(name) for name in (*node.inputs, *node.captures))
        return list(dict.fromkeys(node for node in before if node is not None))

    def captured(self, tensor: str) -> bool:
        """Whether a subgraph reads the tensor."""
        return any(tensor in node.captures for node in self._readers.of(tensor))

    def is_output(self, tensor: str) -> bool:
        return tensor in self._output_names

    def is_input(self, tensor: str) -> bool:
        return tensor in self._input_names

    def is_constant(self, tensor: str) -> bool:
        """Whether the tensor is an initializer that no caller can override."""
        return tensor in self.initializers and tensor not in self._input_names

    def constant(self, tensor: str) -> NDArray[Any] | None:
        """Value of a constant tensor, None if it is not constant.

        The array must not be written to.
        """
        if not self.is_constant(tensor):
            return None
        if tensor not in self._arrays:
            try:
                array = values(self.initializers[tensor])
            except (ValueError, TypeError, KeyError) as error:
                raise ModelError(
                    f"initializer {tensor!r} cannot be read: {error}",
                ) from error
            if (
                array.nbytes > _LARGE
            ):  # no more than one of these is kept, which is read several times in a row
                self._arrays = {
                    name: kept
                    for name, kept in self._arrays.items()
                    if kept.nbytes <= _LARGE
                }
            self._arrays[tensor] = array
        return self._arrays[tensor]

    def elem_type(self, tensor: str) -> int:
        """``TensorProto.DataType`` of a tensor.

        0 (UNDEFINED) if it is not known or not a tensor.
        """
        if tensor in self.initializers:
            return self.initializers[tensor].data_type
        value = self._values.get(tensor)
        return (
            value.type.tensor_type.elem_type
            if value is not None
            else TensorProto.UNDEFINED
        )

    def shape(self, tensor: str) -> Shape | None:
        """Dimensions, a name or None for the unknown ones; None if not even the rank is known."""
        if tensor in self.initializers:
            return tuple(self.initializers[tensor].dims)
        value = self._values.get(tensor)
        if value is None or not value.type.tensor_type.HasField("shape"):
            return None
        return sizes_of(value)

    @property
    def opset(self) -> int:
        """Version of the standard operator set; 0 if the model does not import it."""
        return max(
            (
                o.version
                for o in self._shell.opset_import
                if o.domain in STANDARD_DOMAINS
            ),
            default=0,
        )

    @property
    def ir_version(self) -> int:
        return self._shell.ir_version

    @property
    def names(self) -> frozenset[str]:
        """Every name that is taken."""
        return frozenset(self._names)

    # -- editing
    # ----------------------------------------------------------------------------------

    def fresh(self, name: str) -> str:
        """A name that nothing in the model has, ``name`` itself if it is free."""
        candidate = name
        while candidate in self._names:
            self._counter[name] += 1
            candidate = f"{name}_{self._counter[name]}"
        self._names.add(candidate)
        return candidate

    def add(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        name: str = "",
        domain: str = "",
        **attributes: Any,
    ) -> Node:
        """Append a node; the order is mended by ``to_model``."""
        proto = helper.make_node(op_type, inputs, outputs, domain=domain, **attributes)
        proto.name = self.fresh(name or f"{outputs[0]}_{op_type}")
        node = Node(proto)
        self.nodes.append(node)
        self._link(node)
        self._names.update(outputs)
        return node

    def add_constant(self, name: str, array: NDArray[Any]) -> str:
        """Add an initializer under a fresh name, which is returned."""
        return self.set_constant(self.fresh(name), array)

    def set_constant(self, name: str, array: NDArray[Any]) -> str:
        """Give an initializer a value, of the array's type, ml_dtypes included; its name."""
        array = np.ascontiguousarray(array).reshape(array.shape)
        tensor = (
            self.store.put(name, array)
            if self.store
            else numpy_helper.from_array(array, name)
        )
        self._arrays.pop(name, None)
        self.initializers[name] = tensor
        return name

    def once(self, key: tuple[str, ...], make: Callable[[], list[str]]) -> list[str]:
        """Names of constants that are made of others, so that nodes which read the same share them.

        Made at first.
        """
        if key not in self._made:
            self._made[key] = make()
        return list(self._made[key])

    def add_input(self, name: str, elem_type: int, shape: Sequence[int]) -> str:
        """Add an input under a fresh name, which is returned."""
        name = self.fresh(name)
        self.inputs.append(helper.make_tensor_value_info(name, elem_type, shape))
        self._input_names.add(name)
        return name

    def close_inputs(self) -> list[str]:
        """Turn initializers that are also inputs, which callers may override, into constants.

        Return their names.
        """
        names = [value.name for value in self.inputs if value.name in self.initializers]
        self.inputs = [
            value for value in self.inputs if value.name not in self.initializers
        ]
        self._input_names.difference_update(names)
        return names

    def remove(self, nodes: Iterable[Node]) -> None:
        """Take nodes out of the graph; what they read and computed stays."""
        gone = set(nodes)
        for node in gone:
            self._unlink(node)
        self.nodes = [node for node in self.nodes if node not in gone]

    def set_input(self, node: Node, index: int, tensor: str) -> None:
        self._readers.remove(node, node.inputs[index])
        node.inputs = (*node.inputs[:index], tensor, *node.inputs[index + 1 :])
        self._readers.add(node, tensor)

    def append_input(self, node: Node, tensor: str) -> None:
        node.inputs = (*node.inputs, tensor)
        self._readers.add(node, tensor)

    def set_output(self, node: Node, index: int, tensor: str) -> None:
        self._unlink(node)
        node.outputs = (*node.outputs[:index], tensor, *node.outputs[index + 1 :])
        self._link(node)
        self._names.add(tensor)

    def set_body(
        self,
        node: Node,
        attribute: str,
        place: int,
        body: GraphProto,
    ) -> None:
        """Replace a subgraph among the attributes of a node."""
        self._unlink(node)
        node.set_body(attribute, place, body)
        self._link(node)
        self._names |= all_names(body)

    def reserve(self, names: Iterable[str]) -> None:
        """Never give out these names: they are taken around this graph."""
        self._names.update(names)

    def replace_uses(self, old: str, new: str) -> None:
        """Let every node that reads ``old`` as an input read ``new``.

        Subgraphs and graph outputs are left alone.
        """
        for node in self.consumers(old):
            self.replace_input(node, old, new)

    def replace_input(self, node: Node, old: str, new: str) -> None:
        """Let a node read ``new`` wherever it reads ``old``."""
        for _ in range(node.inputs.count(old)):
            self.set_input(node, node.inputs.index(old), new)

    def bypass(self, node: Node) -> bool:
        """Remove a node whose first output equals its first input.

        False if an output or subgraph pins both names.
        """
        source, result = node.inputs[0], node.outputs[0]
        if self.captured(result):
            return False
        if self.is_output(result):
            producer = self.producer(source)
            if producer is None or self.is_output(source) or self.captured(source):
                return False
            self.remove([node])
            self.set_output(producer, producer.outputs.index(source), result)
            self.replace_uses(source, result)
            return True
        self.remove([node])
        self.replace_uses(result, source)
        return True

    def drop_unused(self) -> None:
        """Remove nodes that nothing reads, then initializers that nothing reads."""
        needed, alive = [value.name for value in self.outputs], set()
        while needed:
            node = self.producer(needed.pop())
            if node is not None and node not in alive:
                alive.add(node)
                needed += [*node.inputs, *node.captures]
        self.remove([node for node in self.nodes if node not in alive])
        open_names = self._output_names | self._input_names
        self.initializers = {
            name: each
            for name, each in self.initializers.items()
            if name in open_names or self._readers.of(name)
        }

    def require(self, opset: int) -> None:
        """Raise the declared version of the standard operator set, and the IR version that goes
        with it.
        """
        for entry in self._shell.opset_import:
            if entry.domain in STANDARD_DOMAINS:
                entry.version = max(entry.version, opset)
        self.import_domain("", opset)
        ir = helper.find_min_ir_version_for(
            [helper.make_opsetid("", self.opset)],
            ignore_unknown=True,
        )
        self._shell.ir_version = max(self._shell.ir_version, ir)

    def import_domain(self, domain: str, version: int = 1) -> None:
        """Declare an operator domain, if the model does not yet."""
        taken = {
            "" if entry.domain in STANDARD_DOMAINS else entry.domain
            for entry in self._shell.opset_import
        }
        if domain not in taken:
            self._shell.opset_import.append(helper.make_opsetid(domain, version))

    def drop_domain(self, domain: str) -> None:
        """No longer declare an operator domain, which no node is of."""
        kept = [entry for entry in self._shell.opset_import if entry.domain != domain]
        del self._shell.opset_import[:]
        self._shell.opset_import.extend(kept)

    def set_functions(self, functions: Iterable[FunctionProto]) -> None:
        """Let the model carry these functions, instead of those it had."""
        del self._shell.functions[:]
        self._shell.functions.extend(functions)

    @property
    def producer_info(self) -> tuple[str, str]:
        """Name and version of the tool that made the model."""
        return self._shell.producer_name, self._shell.producer_version

    def set_producer(self, name: str, version: str) -> None:
        """Name the tool that made the model."""
        self._shell.producer_name = name
        self._shell.producer_version = version

    def set_metadata(self, key: str, value: str) -> None:
        """Let the model carry a text under a key, in place of the one that it had."""
        kept = [entry for entry in self._shell.metadata_props if entry.key != key]
        del self._shell.metadata_props[:]
        self._shell.metadata_props.extend(
            [*kept, onnx.StringStringEntryProto(key=key, value=value)],
        )

    # -- protobuf
    # ----------------------------------------------------------------------------------

    def shell(self) -> ModelProto:
        """All of the model but its graph."""
        result = ModelProto()
        copy_fields(self._shell, result, but="graph")
        return result

    def to_model(self) -> ModelProto:
        """The model, with nodes in topological order; independent of this graph."""
        model = self._skeleton()
        model.graph.initializer.extend(self.initializers.values())
        model.ir_version = ir_version_for(model)
        return model

    def _skeleton(self) -> ModelProto:
        """The model without its initializers."""
        self._sort()
        model = ModelProto()
        del self._shell.graph.node[:], self._shell.graph.initializer[:]
        model.CopyFrom(self._shell)
        graph = model.graph
        graph.node.extend(node.to_proto() for node in self.nodes)
        del graph.input[:], graph.output[:], graph.value_info[:]
        graph.input.extend(self.inputs)
        graph.output.extend(self.outputs)
        interface = self._input_names | self._output_names
        graph.value_info.extend(
            value
            for name, value in self._values.items()
            if name in self._producers
            and name not in interface
            and value.type.WhichOneof("value")
        )
        return model

    def infer(self) -> None:
        """Learn the types and shapes of tensors; what cannot be inferred stays unknown."""
        declared = {value.name: value for value in (*self.inputs, *self.outputs)}
        self._values = (
            self._values
            | infer_values(self._skeleton(), self.initializers.values())
            | declared
        )

    # -- inside
    # ----------------------------------------------------------------------------------

    def _index(self) -> None:
        self._producers: dict[str, Node] = {}
        self._readers = Readers()
        self._input_names = {value.name for value in self.inputs}
        self._output_names = {value.name for value in self.outputs}
        for node in self.nodes:
            self._link(node)

    def _link(self, node: Node) -> None:
        for name in node.outputs:
            if name:
                self._producers[name] = node
        for name in (*node.inputs, *node.captures):
            self._readers.add(node, name)

    def _unlink(self, node: Node) -> None:
        for name in node.outputs:
            if self._producers.get(name) is node:
                del self._producers[name]
        for name in (*node.inputs, *node.captures):
            self._readers.remove(node, name)

    def _sort(self) -> None:
        """Bring the nodes into topological order, as near to the present order as possible."""
        self.nodes = in_order(self.nodes, self.leaders)
