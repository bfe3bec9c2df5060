"""Renaming of the inputs and outputs of a written model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
from onnx import GraphProto

from quark_onnx.common.errors import ConfigError


def rename(path: Path, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give the first inputs and outputs of a model new names.

    External weights are not touched.

    Args:
        path: the model, which is overwritten.
        inputs: new names of the first inputs; further inputs keep their names.
        outputs: new names of the first outputs; further outputs keep their names.

    Raises:
        ConfigError: there are more names than inputs or outputs, or a name is taken.
    """
    # Names stand in the model file, so that weights are not read.
    model = onnx.load(path, load_external_data=False)
    names: dict[str, str] = {}
    for kind, wanted, values in (
        ("input", inputs, model.graph.input),
        ("output", outputs, model.graph.output),
    ):
        if len(wanted) > len(values):
            raise ConfigError(
                f"{kind}_names has {len(wanted)} names, but the model has {len(values)} {kind}s",
            )
        names |= dict(zip([value.name for value in values], wanted, strict=False))
    # The old names become free.
    taken = _names(model.graph) - set(names)
    for new in names.values():
        if new in taken or list(names.values()).count(new) > 1:
            raise ConfigError(
                f"the name {new!r} is taken by another tensor of the model",
            )
    _renamed(model.graph, names)
    onnx.save(model, path)


def _names(graph: GraphProto) -> set[str]:
    """Return the names of all tensors of a graph and of its subgraphs."""
    names = {tensor.name for tensor in graph.initializer}
    names |= {value.name for value in (*graph.input, *graph.output)}
    for node in graph.node:
        names |= {*node.input, *node.output}
        for attribute in node.attribute:
            # The graph of another attribute is empty.
            names |= _names(attribute.g)
    return names


def _renamed(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Rename the tensors of a graph and of its subgraphs, in place."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in graph.node:
        for tensors in (node.input, node.output):
            tensors[:] = [names.get(name, name) for name in tensors]
        for attribute in node.attribute:
            _renamed(attribute.g, names)
