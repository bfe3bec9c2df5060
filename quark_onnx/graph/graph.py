"""Graph: an ONNX model with look-ups in constant time, and verbs for changes.

Nodes and initializers are in Python containers; ``to_model`` writes them back into protobuf. Names
that the model uses anywhere, subgraphs included, are never reused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import (
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from calibrators.onnx_runtime.external_tensors import held_values, is_held, values
from calibrators.onnx_runtime.tensors import tensor_bytes
from quark_onnx.common.errors import ModelError
from quark_onnx.graph.node import (
    STANDARD_DOMAINS,
    Node,
    all_names,
    imported_domains,
    name_apart,
    sparse_names,
    standard_opset,
)
from quark_onnx.graph.readers import Readers
from quark_onnx.graph.shapes import (
    LARGE,
    has_shape,
    infer_values,
    ir_version_for,
    is_static,
    open_negative_sizes,
    sizes_of,
    without_parameters,
)
from quark_onnx.graph.store import Store
from quark_onnx.graph.traversal import copy_fields, in_order, reach

Shape = tuple["int | str | None", ...]

#: Declaration of a tensor of unknown type and shape.
_UNDECLARED = ValueInfoProto()
#: Larger constants (in bytes) are not cached as arrays.
_LARGE = 1 << 18


class Graph:
    """The main graph of a model.

    Attributes:
        initializers: constant tensors by name.
        inputs: inputs as the model declares them.
        outputs: outputs as the model declares them.
        sparse: names of sparse constants.
        store: takes large constants that are added, None for memory.
    """

    def __init__(
        self,
        model: ModelProto,
        initializers: Iterable[TensorProto] | None = None,
        store: Store | None = None,
    ) -> None:
        """Take over ``model``, a copy (see ``Graph.of``).

        Args:
            model: the model, with or without its initializers.
            initializers: the tensors that the model lacks. They may be shared: a tensor is
                replaced, never written to.
            store: takes large constants that are added; None keeps them in memory.
        """
        graph = model.graph
        # The nodes and initializers of the shell become outdated; ``_skeleton`` replaces them.
        self._shell = model
        self.store = store
        # onnx's checker requires a name, onnxruntime does not.
        graph.name = graph.name or "graph"
        open_negative_sizes(graph)
        self._nodes = [Node(proto) for proto in graph.node]
        # Removed nodes that are still among ``_nodes``; see ``nodes``.
        self._removed = set[Node]()
        # Names of removed nodes, which their replacements may take over.
        self._vacant = set[str]()
        tensors = graph.initializer if initializers is None else initializers
        self.initializers: dict[str, TensorProto] = {
            tensor.name: tensor for tensor in tensors
        }
        self.inputs: list[ValueInfoProto] = list(graph.input)
        self.outputs: list[ValueInfoProto] = list(graph.output)
        # Names of bodies, too: a body reads tensors of outer graphs by name.
        self._names = all_names(graph)
        self._values: dict[str, ValueInfoProto] = {
            value.name: value for value in graph.value_info
        }
        # Tensors have no reference to the arrays that hold their values.
        self._held = [
            held_values(tensor)
            for tensor in self.initializers.values()
            if is_held(tensor)
        ]
        self.sparse = sparse_names(graph)
        self._arrays: dict[str, NDArray[Any]] = {}
        self._large = ""  # name of the large constant in the cache
        self._counter: Counter[str] = Counter()
        self._made: dict[tuple[str, ...], list[str]] = {}
        # Plans and messages refer to nodes by name; exporters omit and repeat names.
        name_apart(self.nodes, self.fresh)
        self._index()
        # IR version 3 lists every initializer among the inputs, although nobody feeds it.
        if model.ir_version < 4:
            self.close_inputs()
            model.ir_version = 4
        # onnx infers the shapes of a node from those of the nodes before it.
        self._sort()
        self.infer()

    @classmethod
    def of(cls, model: ModelProto, store: Store | None = None) -> Graph:
        """Return the graph of a copy of ``model`` with shared weights.

        Args:
            model: the model, which is not changed.
            store: takes large constants that are added; None keeps them in memory.
        """
        shell = ModelProto()
        copy_fields(model, shell, but="graph")
        # Initializers are passed on by reference, so that no weight is copied.
        copy_fields(model.graph, shell.graph, but="initializer")
        return cls(shell, model.graph.initializer, store)

    def copy(self) -> Graph:
        """Return an independent graph with shared weights."""
        copy = Graph(self._skeleton(), self.initializers.values(), self.store)
        # Reserved names of outer graphs occur nowhere in the skeleton.
        copy.reserve(self._names)
        return copy

    # -- reading
    # ----------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[Node]:
        """The operators, in topological order when loaded.

        Passes remove nodes one by one; the list is made anew when it is read, not at each removal,
        which would take quadratic time.
        """
        if self._removed:
            self._nodes = [node for node in self._nodes if node not in self._removed]
            self._removed = set()
        return self._nodes

    @nodes.setter
    def nodes(self, nodes: list[Node]) -> None:
        self._nodes = nodes
        self._removed = set()

    def producer(self, tensor: str) -> Node | None:
        """Return the node that computes a tensor, or None."""
        return self._producers.get(tensor)

    def producer_of_type(self, tensor: str, op_types: Container[str]) -> Node | None:
        """Return the producer of a tensor if its operator type, in any domain, is given.

        Args:
            tensor: name of the tensor.
            op_types: operator types without a domain.
        """
        node = self.producer(tensor)
        if node is None or node.op_type not in op_types:
            return None
        return node

    def producer_of_kind(self, tensor: str, kinds: Container[str]) -> Node | None:
        """Return the producer of a tensor if its kind is one of the given kinds; otherwise None.

        Args:
            tensor: name of the tensor.
            kinds: operator types, with the domain unless it is the standard one (``Node.kind``).
        """
        node = self.producer(tensor)
        if node is None or node.kind not in kinds:
            return None
        return node

    def consumers(self, tensor: str) -> list[Node]:
        """Return the distinct readers of a tensor, also by subgraphs, in graph order."""
        # A copy: callers rewire the readers while they iterate.
        return list(self._readers.of(tensor))

    def followers(self, node: Node) -> list[Node]:
        """Return the distinct nodes that read the results of a node."""
        readers: dict[Node, None] = {}
        for output in node.outputs:
            readers.update(dict.fromkeys(self.consumers(output)))
        return list(readers)

    def leaders(self, node: Node) -> list[Node]:
        """Return the distinct nodes that compute the inputs of a node."""
        producers: dict[Node, None] = {}
        for tensor in (*node.inputs, *node.captures):
            producer = self._producers.get(tensor)
            if producer is not None:
                producers[producer] = None
        return list(producers)

    def nodes_of(self, kinds: Container[str]) -> list[Node]:
        """Return the nodes of some kinds, in graph order."""
        return [node for node in self.nodes if node.kind in kinds]

    def nodes_of_type(self, op_types: Container[str]) -> list[Node]:
        """Return the nodes whose operators, of any domain, are given, in graph order."""
        return [node for node in self.nodes if node.op_type in op_types]

    def sorted(self) -> list[Node]:
        """Return the nodes in topological order, as close to the present order as possible.

        Raises:
            ModelError: the nodes form a cycle.
        """
        return in_order(
            self.nodes,
            self.leaders,
            lambda node: (
                f"the graph has a cycle through node {node.name!r} ({node.op_type})"
            ),
        )

    def results(self) -> list[str]:
        """Return the names of all tensors that nodes compute, in graph order."""
        return [result for node in self.nodes for result in node.results]

    @property
    def fed(self) -> list[ValueInfoProto]:
        """Inputs that a caller has to feed: those without a default value."""
        return [value for value in self.inputs if value.name not in self.initializers]

    def captured(self, tensor: str) -> bool:
        """Return whether a subgraph reads the tensor."""
        return any(tensor in node.captures for node in self._readers.of(tensor))

    def is_output(self, tensor: str) -> bool:
        """Return whether a tensor is an output of the model."""
        return tensor in self._output_names

    def is_input(self, tensor: str) -> bool:
        """Return whether a tensor is an input of the model."""
        return tensor in self._input_names

    def is_constant(self, tensor: str) -> bool:
        """Return whether the tensor is an initializer that no caller can override."""
        return tensor in self.initializers and tensor not in self._input_names

    def constant(self, tensor: str) -> NDArray[Any] | None:
        """Return the value of a constant, None if the tensor is not constant.

        The array must not be written to.

        Raises:
            ModelError: the initializer cannot be read, as for a malformed tensor.
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
            # Only the last large array is cached, as it is read several times in a row.
            if array.nbytes > _LARGE:
                self._arrays.pop(self._large, None)
                self._large = tensor
            self._arrays[tensor] = array
        return self._arrays[tensor]

    def known(self, tensor: str) -> NDArray[Any]:
        """Return the value of a tensor that is a constant: see ``constant``."""
        array = self.constant(tensor)
        assert array is not None, tensor
        return array

    def optional_constant(self, tensor: str, default: Any) -> NDArray[Any] | None:
        """Return the value of a constant: a default if omitted, None if not constant.

        Args:
            tensor: name of the tensor; empty for an omitted input.
            default: value of an omitted input.
        """
        if not tensor:
            return np.asarray(default)
        return self.constant(tensor)

    def elem_type(self, tensor: str) -> int:
        """Return the ``TensorProto.DataType`` of a tensor; 0 (UNDEFINED) if unknown."""
        # The tensor itself decides: a declaration of the name may be older than the tensor.
        if tensor in self.initializers:
            return self.initializers[tensor].data_type
        return self._values.get(tensor, _UNDECLARED).type.tensor_type.elem_type

    def is_tensor(self, name: str) -> bool:
        """Return whether a value is no sequence, map or optional, as far as known."""
        kind = self._values.get(name, _UNDECLARED).type.WhichOneof("value")
        return kind in ("tensor_type", None)

    def shape(self, tensor: str) -> Shape | None:
        """Return the dimensions, a name or None if open; None for an unknown rank."""
        if tensor in self.initializers:
            return tuple(self.initializers[tensor].dims)
        value = self._values.get(tensor, _UNDECLARED)
        return sizes_of(value) if has_shape(value) else None

    def has_static_shape(self, tensor: str) -> bool:
        """Return whether every dimension of a tensor is known."""
        return is_static(self.shape(tensor))

    def sizes(self, tensor: str) -> Shape:
        """Return the dimensions of a tensor; empty for an unknown rank, too."""
        return self.shape(tensor) or ()

    @property
    def opset(self) -> int:
        """Version of the standard operator set; 0 if the model does not import it."""
        # Imports under both names of the standard domain agree (``check_fields``).
        return standard_opset(self._shell.opset_import)

    @property
    def ir_version(self) -> int:
        """Declared version of the ONNX IR."""
        return self._shell.ir_version

    @property
    def names(self) -> frozenset[str]:
        """All names in use."""
        return frozenset(self._names)

    # -- editing
    # ----------------------------------------------------------------------------------

    def fresh(self, name: str) -> str:
        """Return an unused name: ``name``, with a number if need be."""
        candidate = name
        # The counter per name keeps a series of fresh names linear in time.
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
        """Append a node; ``to_model`` restores the topological order.

        Args:
            op_type: type of the operator.
            inputs: names of the inputs, "" for an omitted one.
            outputs: names of the outputs, at least one; ``fresh`` returns unused names.
            name: preferred name of the node; by default that of the first output and the type.
                The name of a removed node is taken over, so that settings by name still find it.
            domain: domain of the operator; empty for the standard one, otherwise see
                ``import_domain``.
            **attributes: attributes by name; those of value None are omitted.
        """
        proto = helper.make_node(op_type, inputs, outputs, domain=domain, **attributes)
        if name and name in self._vacant:
            self._vacant.remove(name)
            proto.name = name
        else:
            proto.name = self.fresh(name or f"{outputs[0]}_{op_type}")
        node = Node(proto)
        self._nodes.append(node)
        self._link(node)
        self._names.update(outputs)
        return node

    def compute(
        self, op_type: str, inputs: Sequence[str], result: str, **settings: Any
    ) -> str:
        """Append a node with one result under a fresh name, and return the name.

        Args:
            op_type: type of the operator.
            inputs: names of the inputs, "" for an omitted one.
            result: preferred name of the result.
            **settings: name of the node, domain and attributes, as for ``add``.
        """
        result = self.fresh(result)
        self.add(op_type, inputs, [result], **settings)
        return result

    def add_constant(self, name: str, array: NDArray[Any]) -> str:
        """Add an initializer under a fresh name, and return the name."""
        return self.set_constant(self.fresh(name), array)

    def set_constant(self, name: str, array: NDArray[Any]) -> str:
        """Set the value of an initializer, of the array's type, and return the name.

        Args:
            name: name of the initializer, which may be a new one.
            array: the value; a large one goes to ``store`` if there is one.
        """
        # ascontiguousarray returns a vector of one element for a scalar.
        array = np.ascontiguousarray(array).reshape(array.shape)
        if self.store:
            tensor = self.store.put(name, array)
        else:
            tensor = numpy_helper.from_array(array, name)
        self._arrays.pop(name, None)
        self.initializers[name] = tensor
        return name

    def once(self, key: tuple[str, ...], make: Callable[[], list[str]]) -> list[str]:
        """Return the names of derived constants, created once per key and then shared.

        Args:
            key: identifies the constants: what is derived, and the name of its source.
            make: adds the constants and returns their names; called for a new key alone.
        """
        if key not in self._made:
            self._made[key] = make()
        return list(self._made[key])

    def shared_constant(
        self, key: tuple[str, ...], name: str, make: Callable[[], NDArray[Any]]
    ) -> str:
        """Return the name of a derived constant, created once per key and then shared.

        Args:
            key: as for ``once``.
            name: preferred name.
            make: returns the value; called for a new key alone.
        """
        [constant] = self.once(key, lambda: [self.add_constant(name, make())])
        return constant

    def add_input(self, name: str, elem_type: int, shape: Sequence[int]) -> str:
        """Add an input under a fresh name, and return the name.

        Args:
            name: preferred name.
            elem_type: a ``TensorProto.DataType``.
            shape: the sizes.
        """
        name = self.fresh(name)
        self.inputs.append(helper.make_tensor_value_info(name, elem_type, shape))
        self._input_names.add(name)
        return name

    def close_inputs(self) -> list[str]:
        """Turn overridable initializers into constants, and return the names."""
        names = [value.name for value in self.inputs if value.name in self.initializers]
        self.inputs = self.fed
        self._input_names.difference_update(names)
        return names

    def remove(self, nodes: Iterable[Node]) -> None:
        """Remove nodes; inputs and outputs stay."""
        if not self._removed:
            # A list that was read before stays as it is when nodes are added.
            self._nodes = list(self._nodes)
        for node in dict.fromkeys(nodes):
            self._unlink(node)
            self._removed.add(node)
            self._vacant.add(node.name)

    def set_input(self, node: Node, index: int, tensor: str) -> None:
        """Let a node read another tensor.

        Args:
            node: a node of the graph.
            index: index of the input, which must be there, if only as an omitted one.
            tensor: name of the tensor.
        """
        self._readers.remove(node, node.inputs[index])
        node.inputs = (*node.inputs[:index], tensor, *node.inputs[index + 1 :])
        self._readers.add(node, tensor)

    def append_input(self, node: Node, tensor: str) -> None:
        """Add an input to a node."""
        node.inputs = (*node.inputs, tensor)
        self._readers.add(node, tensor)

    def fill_input(self, node: Node, index: int, tensor: str) -> None:
        """Let a node read another tensor at an index, which may be the first absent input.

        Args:
            node: a node of the graph.
            index: index of the input, at most the number of inputs.
            tensor: name of the tensor.
        """
        if index < len(node.inputs):
            self.set_input(node, index, tensor)
        else:
            self.append_input(node, tensor)

    def set_output(self, node: Node, index: int, tensor: str) -> None:
        """Rename an output of a node.

        Args:
            node: a node of the graph.
            index: index of the output.
            tensor: the new name. Readers of the former name are left unchanged.
        """
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
        """Replace a subgraph among the attributes of a node.

        Args:
            node: a node of the graph.
            attribute: name of the attribute.
            place: index of the subgraph in an attribute that holds several.
            body: the new subgraph, which is copied.
        """
        self._unlink(node)
        node.set_body(attribute, place, body)
        self._link(node)
        self._names |= all_names(body)

    def reserve(self, names: Iterable[str]) -> None:
        """Reserve names of outer graphs.

        Args:
            names: names that ``fresh`` is not to return.
        """
        self._names.update(names)

    def replace_uses(self, old: str, new: str) -> None:
        """Let every node that reads ``old`` as an input read ``new``.

        Subgraphs and graph outputs are left unchanged.

        Args:
            old: name of the tensor to read no more.
            new: name of the tensor to read.
        """
        for node in self.consumers(old):
            self.replace_input(node, old, new)

    def replace_input(self, node: Node, old: str, new: str) -> None:
        """Let a node read ``new`` instead of ``old``."""
        # A node may read a tensor several times, such as Mul of x and x.
        for _ in range(node.inputs.count(old)):
            self.set_input(node, node.inputs.index(old), new)

    def bypass(self, node: Node) -> bool:
        """Remove a node with equal first input and output.

        Return False if an output or subgraph requires both names.

        Args:
            node: the node, such as an Identity. If its result is an output, the producer of its
                input takes over the name of the output.
        """
        source = node.inputs[0]
        result = node.outputs[0]
        # ``replace_uses`` leaves bodies unchanged, which would then read a missing tensor.
        if self.captured(result):
            return False
        # The name of an output is part of the interface: the producer takes the name over, unless
        # the name of its own result is needed as well.
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

    def unused(self) -> list[Node]:
        """Return the nodes that no output depends on."""
        # Nodes that only bodies read stay: ``leaders`` follows the captures of a node.
        producers = [self.producer(output.name) for output in self.outputs]
        alive = reach([node for node in producers if node is not None], self.leaders)
        return [node for node in self.nodes if node not in alive]

    def drop_unused(self) -> None:
        """Remove unused nodes, then unused initializers."""
        self.remove(self.unused())
        # An initializer may be an output itself, or the default value of an input.
        open_names = self._output_names | self._input_names
        self.initializers = {
            name: tensor
            for name, tensor in self.initializers.items()
            if name in open_names or self._readers.of(name)
        }

    def require(self, opset: int) -> None:
        """Raise the declared opset, and the IR version if need be."""
        for entry in self._shell.opset_import:
            if entry.domain in STANDARD_DOMAINS:
                entry.version = max(entry.version, opset)
        # A model of other domains alone imports no standard operator set.
        self.import_domain("", opset)
        # Each operator set has a least IR version (VERSION_TABLE of onnx.helper).
        ir = helper.find_min_ir_version_for(
            [helper.make_opsetid("", self.opset)],
            ignore_unknown=True,
        )
        self._shell.ir_version = max(self._shell.ir_version, ir)

    def import_domain(self, domain: str, version: int = 1) -> None:
        """Import an operator domain, if the model does not yet.

        Args:
            domain: the domain.
            version: version to import; a present import keeps its version.
        """
        if domain not in imported_domains(self._shell.opset_import):
            self._shell.opset_import.append(helper.make_opsetid(domain, version))

    def drop_domain(self, domain: str) -> None:
        """Remove the import of an unused operator domain."""
        kept = [entry for entry in self._shell.opset_import if entry.domain != domain]
        del self._shell.opset_import[:]
        self._shell.opset_import.extend(kept)

    def set_functions(self, functions: Iterable[FunctionProto]) -> None:
        """Replace the functions of the model."""
        del self._shell.functions[:]
        self._shell.functions.extend(functions)

    @property
    def producer_info(self) -> tuple[str, str]:
        """The name and the version of the tool that wrote the model."""
        return self._shell.producer_name, self._shell.producer_version

    def set_producer(self, name: str, version: str) -> None:
        """Set the tool that wrote the model.

        Args:
            name: the tool.
            version: the version of the tool.
        """
        self._shell.producer_name = name
        self._shell.producer_version = version

    def set_metadata(self, key: str, value: str) -> None:
        """Set an entry of the model's metadata.

        Args:
            key: key of the entry; a present entry is replaced.
            value: text of the entry.
        """
        kept = [entry for entry in self._shell.metadata_props if entry.key != key]
        del self._shell.metadata_props[:]
        self._shell.metadata_props.extend(
            [*kept, onnx.StringStringEntryProto(key=key, value=value)],
        )

    # -- protobuf
    # ----------------------------------------------------------------------------------

    def shell(self) -> ModelProto:
        """Return the model without the graph."""
        result = ModelProto()
        copy_fields(self._shell, result, but="graph")
        return result

    def to_model(self) -> ModelProto:
        """Return the model with nodes in topological order, independent of the graph."""
        model = self._skeleton()
        model.graph.initializer.extend(self.initializers.values())
        model.ir_version = ir_version_for(model)
        return model

    def outline(self) -> ModelProto:
        """Return the model for the inference of shapes: large weights have no values."""
        model = self._skeleton(without_parameters)
        for tensor in self.initializers.values():
            if tensor_bytes(tensor) > LARGE:
                empty = TensorProto(name=tensor.name, data_type=tensor.data_type)
                empty.dims.extend(tensor.dims)
                model.graph.initializer.append(empty)
            else:
                model.graph.initializer.append(tensor)
        return model

    def _skeleton(
        self,
        form: Callable[[NodeProto], NodeProto] = lambda proto: proto,
    ) -> ModelProto:
        """Return the model without initializers; ``form`` leaves out attributes of nodes."""
        self._sort()
        model = ModelProto()
        # The shell's own nodes and initializers are outdated, and would be copied for nothing.
        del self._shell.graph.node[:]
        del self._shell.graph.initializer[:]
        model.CopyFrom(self._shell)
        graph = model.graph
        graph.node.extend(node.to_proto(form) for node in self.nodes)
        del graph.input[:]
        del graph.output[:]
        del graph.value_info[:]
        graph.input.extend(self.inputs)
        graph.output.extend(self.outputs)
        interface = self._input_names | self._output_names
        # Declarations of removed nodes stay in ``_values``. Inputs and outputs are declared
        # above.
        graph.value_info.extend(
            value
            for name, value in self._values.items()
            if name in self._producers
            and name not in interface
            and value.type.WhichOneof("value")
        )
        return model

    def infer(self) -> None:
        """Infer the types and shapes of tensors, as far as possible."""
        # The interface is a promise to callers: its declarations override inferred ones.
        declared = {value.name: value for value in (*self.inputs, *self.outputs)}
        self._values = (
            self._values
            | infer_values(
                self._skeleton(without_parameters),
                self.initializers.values(),
            )
            | declared
        )

    # -- inside
    # ----------------------------------------------------------------------------------

    def _index(self) -> None:
        self._producers: dict[str, Node] = {}
        self._readers = Readers()
        self._input_names = {value.name for value in self.inputs}
        self._output_names = {output.name for output in self.outputs}
        for node in self.nodes:
            self._link(node)

    def _link(self, node: Node) -> None:
        self._producers.update(dict.fromkeys(node.results, node))
        for name in node.reads:
            self._readers.add(node, name)

    def _unlink(self, node: Node) -> None:
        for name in node.outputs:
            # Another node, linked later, may compute this name already.
            if self._producers.get(name) is node:
                del self._producers[name]
        for name in node.reads:
            self._readers.remove(node, name)

    def _sort(self) -> None:
        """Sort the nodes topologically, as close to the present order as possible."""
        if not self._is_sorted():
            self.nodes = self.sorted()

    def _is_sorted(self) -> bool:
        """Return whether every node follows the nodes that compute its inputs.

        This takes a fifth of the time of sorting, and most graphs are sorted already.
        """
        before = set[Node]()
        for node in self.nodes:
            for tensor in (*node.inputs, *node.captures):
                leader = self._producers.get(tensor)
                if leader is not None and leader not in before:
                    return False
            before.add(node)
        return True
