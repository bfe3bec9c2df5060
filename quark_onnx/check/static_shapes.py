"""Give a graph static input shapes, and remove inputs that have default values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType

from onnx import ModelProto, ValueInfoProto, helper

from calibrators.base import is_whole
from quark_onnx.check.sizes import check_sizes
from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.config.checks import require
from quark_onnx.graph.constants import describe_closed, overridable
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.shapes import (
    has_shape,
    infer_values,
    is_static,
    is_tensor,
    sizes_of,
)

Sizes = Sequence[int | str | None]


def fixed(
    graph: Graph,
    shapes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    *,
    batch: int = 1,
) -> tuple[Graph, list[str]]:
    """Return the graph with static input shapes and newly inferred ones, and notes.

    A dimension with a name has the same size wherever the name occurs. The first dimension of an
    input of two or more is the batch; other dynamic dimensions that ``shapes`` does not give stay
    open. Initializers that are also inputs become constants.

    Args:
        graph: the graph, which is not changed.
        shapes: sizes by the name of an input, one per dimension.
        batch: the size of a dynamic batch.

    Raises:
        ConfigError: there is no such input, or its shape differs.
        ModelError: a tensor exceeds the size limit with these shapes.
    """
    closed = list[str]()
    if overridable(graph):
        graph = graph.copy()
        closed = describe_closed(graph.close_inputs())
    declared = {value.name: graph.shape(value.name) for value in graph.inputs}
    wanted = _wanted(declared, shapes, batch)
    changed = {
        name: sizes for name, sizes in wanted.items() if tuple(sizes) != declared[name]
    }
    if changed:
        notes = [_shape_note("input", name, sizes) for name, sizes in changed.items()]
        model = graph.to_model()
        # Declarations of inner tensors carry the open dimensions; inference writes new ones.
        del model.graph.input[:]
        del model.graph.value_info[:]
        model.graph.input.extend(
            _declared(value, changed.get(value.name)) for value in graph.inputs
        )
        named_sizes = _sizes_by_name(declared, wanted)
        _set_outputs(model, graph, _static_outputs(model, graph, named_sizes))
        # Sizes that depended on an open dimension are known now.
        check_sizes(model)
        return Graph(model, store=graph.store), notes + closed
    open_outputs = {
        output.name
        for output in graph.outputs
        if not graph.has_static_shape(output.name)
    }
    if not open_outputs:
        return graph, closed
    model = graph.to_model()
    inferred = _inferred(model, graph, open_outputs)
    # Sorted, as the order of a set, and so that of the notes, differs between runs.
    static = {
        name: inferred[name]
        for name in sorted(open_outputs & inferred.keys())
        if has_shape(inferred[name]) and is_static(sizes_of(inferred[name]))
    }
    if not static:
        return graph, closed
    _set_outputs(model, graph, static)
    notes = [
        _shape_note("output", name, sizes_of(value)) for name, value in static.items()
    ]
    return Graph(model, store=graph.store), closed + notes


def _sizes_by_name(
    declared: Mapping[str, Sizes | None], wanted: Mapping[str, Sizes]
) -> dict[str, int]:
    """Return the sizes that the named dimensions of inputs have got.

    Args:
        declared: declared shapes by input; None for an unknown rank.
        wanted: new shapes by input.
    """
    named_sizes = dict[str, int]()
    for name, sizes in wanted.items():
        # An undeclared shape has no names to bind.
        for dim, size in zip(declared[name] or (), sizes, strict=False):
            if isinstance(dim, str) and isinstance(size, int):
                named_sizes[dim] = size
    return named_sizes


def _static_outputs(
    model: ModelProto, graph: Graph, named_sizes: Mapping[str, int]
) -> dict[str, ValueInfoProto]:
    """Return the outputs with inferred shapes, or with the sizes of their named dimensions.

    onnx infers no shape behind operators of other domains (QGemm of com.microsoft), and an output
    without any shape is invalid.

    Args:
        model: the model with the new input shapes.
        graph: the graph before, with the declared outputs.
    """
    inferred = _inferred(model, graph, {output.name for output in graph.outputs})
    outputs = dict[str, ValueInfoProto]()
    for value in graph.outputs:
        output = inferred.get(value.name, value)
        shape = graph.shape(value.name)
        if shape is not None and not has_shape(output):
            output = _declared(value, _closed(shape, named_sizes, None))
        outputs[value.name] = output
    return outputs


def _shape_note(what: str, name: str, sizes: Sizes) -> str:
    return f"{what} {name!r} has the shape {list(sizes)}"


def _inferred(
    model: ModelProto, graph: Graph, forgotten: AbstractSet[str]
) -> dict[str, ValueInfoProto]:
    """Return the inferred declarations of a model's tensors, by name.

    Args:
        forgotten: the outputs whose declared shapes are not used.
    """
    skeleton = ModelProto()
    # ``infer_values`` consumes its argument, and takes the initializers apart.
    skeleton.CopyFrom(model)
    del skeleton.graph.initializer[:]
    del skeleton.graph.output[:]
    skeleton.graph.output.extend(
        _declared(value, None, forget=value.name in forgotten)
        for value in graph.outputs
    )
    return infer_values(skeleton, graph.initializers.values())


def _set_outputs(
    model: ModelProto, graph: Graph, new: Mapping[str, ValueInfoProto]
) -> None:
    """Replace declarations of a model's outputs by name, in place; others keep the graph's."""
    del model.graph.output[:]
    model.graph.output.extend(new.get(value.name, value) for value in graph.outputs)


def _wanted(
    declared: Mapping[str, Sizes | None],
    shapes: Mapping[str, Sequence[int]],
    batch: int,
) -> dict[str, Sizes]:
    """Return the new shapes of inputs, as far as the caller or names of dimensions tell.

    Args:
        declared: declared shapes by input; None for an unknown rank.
        shapes: sizes by the name of an input, as the caller gave them.
        batch: size of a batch that the caller did not give.

    Returns:
        Shapes by input, which may have open dimensions; none for an unknown rank without sizes.

    Raises:
        ConfigError: there is no such input, or sizes contradict a shape or each other.
    """
    named_sizes = dict[str, int]()
    wanted = dict[str, Sizes]()
    for name, sizes in shapes.items():
        if name not in declared:
            raise ConfigError(
                f"shape: the model has no input {name!r}{nearest(name, declared)}",
            )
        _bind(named_sizes, name, declared[name], sizes)
        wanted[name] = list(sizes)
    unset = {
        name: shape
        for name, shape in declared.items()
        if name not in wanted and shape is not None
    }
    for shape in unset.values():
        # The first dimension of two or more is the batch. A name that the caller's shapes have
        # bound already keeps the size.
        if len(shape) > 1 and isinstance(shape[0], str):
            named_sizes.setdefault(shape[0], batch)
    for name, shape in unset.items():
        wanted[name] = _closed(shape, named_sizes, batch)
    return wanted


def _closed(shape: Sizes, named_sizes: Mapping[str, int], batch: int | None) -> Sizes:
    """Return a shape with the sizes of its named dimensions, and of the batch if given.

    Args:
        shape: a shape with names or None for open dimensions.
        batch: size of an unnamed first dimension of two or more; None to leave it open.
    """
    sizes = [
        named_sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in shape
    ]
    if len(sizes) > 1 and sizes[0] is None:
        sizes[0] = batch
    return sizes


def _bind(
    named_sizes: dict[str, int], name: str, shape: Sizes | None, sizes: Sequence[int]
) -> None:
    """Check sizes against the shape of an input, and record the sizes of named dimensions.

    Args:
        named_sizes: sizes by the name of a dimension, to which those of this input are added.
        shape: declared shape of the input; None for an unknown rank.
        sizes: sizes from the caller, one per dimension.

    Raises:
        ConfigError: a size is not a whole number from 1, or contradicts the shape or
            ``named_sizes``.
    """
    whole = all(is_whole(size, 1) for size in sizes)
    wanted = "whole numbers of 1 or more"
    require(whole, f"shape of {name!r}", list(sizes), wanted)
    if shape is None:
        return
    if len(shape) != len(sizes):
        raise ConfigError(
            f"shape of {name!r} has {len(sizes)} dimensions, the input has"
            f" {len(shape)}: {list(shape)}",
        )
    for dim, size in zip(shape, sizes, strict=True):
        expected = str(dim)
        bound: int | None = size
        if isinstance(dim, int):
            bound = dim
        elif isinstance(dim, str):
            # The first input with the name binds the size for all others.
            bound = named_sizes.setdefault(dim, size)
            expected = f"{dim} = {bound}"
        if bound != size:
            raise ConfigError(
                f"shape of {name!r} is {list(sizes)}, but the input has {expected} for"
                f" {size}",
            )


def _declared(
    value: ValueInfoProto, shape: Sizes | None, *, forget: bool = False
) -> ValueInfoProto:
    """Return a declaration of a tensor with another shape.

    Args:
        value: the declaration, which is returned uncopied if nothing changes, as for sequences.
        shape: the new shape, with names or None for open dimensions; None to keep the present one.
        forget: without ``shape``, remove the present shape.
    """
    # Sequences and optionals have no tensor shape to replace.
    if not (shape or forget) or not is_tensor(value):
        return value
    copy = ValueInfoProto()
    copy.CopyFrom(value)
    elem_type = value.type.tensor_type.elem_type
    copy.type.CopyFrom(helper.make_tensor_type_proto(elem_type, shape))
    return copy
