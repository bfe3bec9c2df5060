"""fixed-shapes: inputs of fixed sizes, and a graph in which no size is left to be computed.

Compilers for accelerators ask for it. A dimension that several inputs share by its name is fixed for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto, ValueInfoProto, helper

from quark_onnx.convert.base import Settings, conversion, counted, everywhere, reloaded
from quark_onnx.errors import ConfigError, nearest
from quark_onnx.graph import Graph
from quark_onnx.graph.shapes import infer_values
from quark_onnx.passes import fold_constants, fold_shapes

Shapes = Mapping[str, tuple[int, ...]]


@conversion("fixed-shapes", keeps="exactly", reads=["shapes"])
def fixed_shapes(graph: Graph, settings: Settings) -> tuple[Graph, list[str]]:
    """Inputs of the sizes of --shape, a batch of 1 without one; what was computed of sizes becomes constant."""
    shapes = _shapes(graph, settings.shapes)
    changed = {name: shape for name, shape in shapes.items() if shape != graph.shape(name)}
    declared = {value.name: value for value in graph.outputs}
    if changed:
        graph = _with_inputs(graph, changed)
    folded = 0
    while count := everywhere(graph, lambda inner: fold_shapes(inner) + fold_constants(inner)):
        graph, folded = reloaded(graph), folded + count
    graph = _with_outputs(graph, declared)
    notes = [f"{name}: {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in changed.items()]
    notes += [f"{line} folded" for line in counted(folded, "node")]
    dynamic = [name for node in graph.nodes for name in node.outputs if name and not _is_fixed(graph, name)]
    if notes and dynamic:
        notes.append(f"{len(dynamic)} tensors have sizes that depend on values, {dynamic[0]!r} the first of them")
    return graph, notes


def _is_fixed(graph: Graph, tensor: str) -> bool:
    shape = graph.shape(tensor)
    return shape is not None and all(isinstance(size, int) for size in shape)


def _shapes(graph: Graph, given: Shapes) -> dict[str, tuple[int, ...]]:
    """The fixed shape of each input.

    Raises:
        ConfigError: a shape that is given does not fit, or a dimension has no size.
    """
    declared = {value.name: graph.shape(value.name) for value in graph.inputs if _is_tensor(value)}
    for name in given:
        if name not in declared:
            raise ConfigError(f"a shape is given for {name!r}, which is no input{nearest(name, declared)}")
    sizes: dict[str, int] = {}
    for name, shape in given.items():
        _bind(name, declared[name], shape, sizes)
    for name, dims in declared.items():
        if dims is None and name not in given:
            raise ConfigError(f"nothing is known of the shape of input {name!r}; give it (--shape {name}=1,3,224,224)")
        if dims and name not in given and isinstance(dims[0], str):
            sizes.setdefault(dims[0], 1)
    return {name: given.get(name) or _filled(name, dims or (), sizes) for name, dims in declared.items()}


def _bind(name: str, dims: tuple[int | str | None, ...] | None, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    """Learn the sizes of named dimensions from the shape of an input."""
    if dims is None:
        return
    written = ",".join(str(dim) if dim is not None else "?" for dim in dims)
    if len(dims) != len(shape):
        raise ConfigError(
            f"input {name!r} has {len(dims)} dimensions ({written}), its shape is given with {len(shape)}"
        )
    for dim, size in zip(dims, shape, strict=True):
        if isinstance(dim, int) and dim != size:
            raise ConfigError(f"input {name!r} has the shape {written}; {','.join(map(str, shape))} does not fit")
        if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
            raise ConfigError(f"dimension {dim!r} of input {name!r} is given as {size}, and as {sizes[dim]} elsewhere")


def _filled(name: str, dims: tuple[int | str | None, ...], sizes: dict[str, int]) -> tuple[int, ...]:
    result = []
    for place, dim in enumerate(dims):
        size = sizes.get(dim) if isinstance(dim, str) else dim
        if size is None and place:
            example = ",".join(str(each) if isinstance(each, int) else "N" for each in dims)
            what = f"dimension {dim!r}" if dim else f"dimension {place}"
            raise ConfigError(f"{what} of input {name!r} has no size; give the shape (--shape {name}={example})")
        result.append(1 if size is None else size)
    return tuple(result)


def _is_tensor(value: ValueInfoProto) -> bool:
    return value.type.WhichOneof("value") in ("tensor_type", None)


def _with_inputs(graph: Graph, shapes: Shapes) -> Graph:
    """The graph with other shapes of inputs; what was known of others is forgotten."""
    model = graph.to_model()
    del model.graph.value_info[:]
    for value in model.graph.input:
        if value.name in shapes:
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, kind, shapes[value.name]))
    for value in model.graph.output:
        if any(not dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim):
            value.type.tensor_type.ClearField("shape")
    return Graph.of(model, graph.store)


def _with_outputs(graph: Graph, declared: Mapping[str, ValueInfoProto]) -> Graph:
    """The graph with the shapes of outputs that are inferred; those that were declared where none is."""
    model = graph.to_model()
    skeleton = ModelProto()
    skeleton.CopyFrom(model)
    del skeleton.graph.initializer[:]
    inferred = infer_values(skeleton, model.graph.initializer)
    for value in model.graph.output:
        if not value.type.tensor_type.HasField("shape"):
            found = inferred.get(value.name, value)
            value.CopyFrom(found if found.type.tensor_type.HasField("shape") else declared[value.name])
    return Graph.of(model, graph.store)
