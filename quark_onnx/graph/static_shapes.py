"""Give a graph static input shapes, and remove inputs that have default values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import ModelProto, ValueInfoProto, helper

from quark_onnx.errors import ConfigError, nearest
from quark_onnx.graph.constants import describe_closed, overridable
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.shapes import infer_values, is_static, sizes_of

Sizes = Sequence[int | str | None]


def fixed(
    graph: Graph,
    shapes: Mapping[str, Sequence[int]] | None = None,
    *,
    batch: int = 1,
) -> tuple[Graph, list[str]]:
    """The graph with static input shapes, those of everything behind them learned anew, of outputs
    that are declared with open ones, too; and what was fixed, in words.

    A dimension with a name has the same size wherever the name stands. The first dimension of an
    input of two or more is the batch; other dynamic dimensions that ``shapes`` does not tell stay
    as they are. Initializers that are listed as inputs, too, become plain constants.

    Args:
        shapes: sizes by the name of an input, one for each of its dimensions.
        batch: the size of a dynamic batch.

    Raises:
        ConfigError: there is no such input, or its shape is another one.
    """
    notes = list[str]()
    if overridable(graph):
        graph = graph.copy()
        notes += describe_closed(graph.close_inputs())
    now = {value.name: graph.shape(value.name) for value in graph.inputs}
    changed = {
        name: sizes
        for name, sizes in _wanted(now, shapes or {}, batch).items()
        if tuple(sizes) != now[name]
    }
    open_ = {
        value.name for value in graph.outputs if not is_static(graph.shape(value.name))
    }
    if not changed and not open_:
        return graph, notes
    notes[:0] = [
        f"input {name!r} has the shape {list(sizes)}" for name, sizes in changed.items()
    ]
    model = graph.to_model()
    inner, outputs = model.graph, list(graph.outputs)
    del inner.input[:], inner.output[:]
    inner.input.extend(
        _declared(value, changed.get(value.name)) for value in graph.inputs
    )
    inner.output.extend(outputs)
    if changed:
        del inner.value_info[:]
    if changed or open_:
        del inner.output[:]
        inner.output.extend(
            _declared(value, None, forget=bool(changed) or value.name in open_)
            for value in outputs
        )
        skeleton = ModelProto()
        skeleton.CopyFrom(model)
        del skeleton.graph.initializer[:]
        inferred = infer_values(skeleton, graph.initializers.values())
        known = inferred
        if not changed:
            known = {
                name: value
                for name, value in inferred.items()
                if name in open_ and _is_static(value)
            }
            notes += [
                f"output {name!r} has the shape {list(sizes_of(value))}"
                for name, value in sorted(known.items())
            ]
        del inner.output[:]
        inner.output.extend(known.get(value.name, value) for value in outputs)
    return (Graph(model, store=graph.store), notes) if notes else (graph, [])


def _is_static(value: ValueInfoProto) -> bool:
    return value.type.tensor_type.HasField("shape") and is_static(sizes_of(value))


def _wanted(
    now: Mapping[str, Sizes | None],
    shapes: Mapping[str, Sequence[int]],
    batch: int,
) -> dict[str, Sizes]:
    """The shape that each input is to have, where one is known."""
    known, wanted = dict[str, int](), dict[str, Sizes]()
    for name, sizes in shapes.items():
        if name not in now:
            raise ConfigError(
                f"shape: the model has no input {name!r}{nearest(name, now)}",
            )
        _bind(known, name, now[name], sizes)
        wanted[name] = list(sizes)
    rest = {
        name: shape
        for name, shape in now.items()
        if shape is not None and name not in wanted
    }
    for shape in rest.values():
        if len(shape) > 1 and isinstance(shape[0], str):
            known.setdefault(shape[0], batch)
    for name, shape in rest.items():
        own = [
            known.get(size, size) if isinstance(size, str) else size for size in shape
        ]
        wanted[name] = [batch, *own[1:]] if len(own) > 1 and own[0] is None else own
    return wanted


def _bind(
    known: dict[str, int],
    name: str,
    shape: Sizes | None,
    sizes: Sequence[int],
) -> None:
    """Hold sizes against a shape, and learn the names in it."""
    if any(type(size) is not int or size < 1 for size in sizes):
        raise ConfigError(
            f"shape of {name!r} is {list(sizes)}; it must be whole numbers of 1 or"
            " more",
        )
    if shape is None:
        return
    if len(shape) != len(sizes):
        raise ConfigError(
            f"shape of {name!r} has {len(sizes)} dimensions, the input has"
            f" {len(shape)}: {list(shape)}",
        )
    for own, size in zip(shape, sizes, strict=True):
        if (isinstance(own, int) and own != size) or (
            isinstance(own, str) and known.setdefault(own, size) != size
        ):
            other = own if isinstance(own, int) else f"{own} = {known[own]}"
            raise ConfigError(
                f"shape of {name!r} is {list(sizes)}, but the input has {other} for"
                f" {size}",
            )


def _declared(
    value: ValueInfoProto,
    shape: Sizes | None,
    *,
    forget: bool = False,
) -> ValueInfoProto:
    """A declaration of a tensor with another shape.

    Itself without one, unless it is to forget its own.
    """
    if (not shape and not forget) or value.type.WhichOneof("value") != "tensor_type":
        return value
    copy = ValueInfoProto()
    copy.CopyFrom(value)
    copy.type.CopyFrom(
        helper.make_tensor_type_proto(value.type.tensor_type.elem_type, shape),
    )
    return copy
