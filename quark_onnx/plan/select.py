"""Which decision of the configuration applies to which node."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quark_onnx.config import Override, QConfig, QuantizationSpec, TensorOverrides
from quark_onnx.errors import ConfigError, nearest
from quark_onnx.graph import Graph, Node, reach
from quark_onnx.graph.node import inner_nodes
from quark_onnx.plan.existing import existing

#: Why a node stays float that an override or ``exclude`` names.
EXCLUDED = "excluded"
_OTHER_TYPE, _OTHER_NODE = "its operator type was not asked for", "it was not asked for"


@dataclass(frozen=True)
class NodeSpec:
    """What is asked for a node.

    Attributes:
        activation, weight: how its tensors are quantized, None for not at all.
        keep: why the whole node stays float, empty if it does not.
        overridden: whether an override speaks of its activations.
    """

    activation: QuantizationSpec | None
    weight: QuantizationSpec | None
    keep: str = ""
    overridden: bool = False


def select(  # noqa: C901, PLR0912
    graph: Graph,
    config: QConfig,
    *,
    strict: bool = True,
) -> dict[Node, NodeSpec]:
    """The settings of each node: the configuration's own, changed by the overrides that match, in
    their order.

    Args:
        strict: a pattern has to match. The user's graph is held to it; what folding has left of it
            is not.

    Raises:
        ConfigError: a pattern matches nothing in the graph; the message has the nearest name.
    """
    if strict and config.tensors:
        _check_tensors(graph, config)
    weights = {True: config.table, False: config.weight}
    chosen = {
        node: NodeSpec(config.activation, weights[looks_up(graph, node)])
        for node in graph.nodes
    }
    if config.op_types:
        kinds = {node.kind for node in (*graph.nodes, *inner_nodes(graph.nodes))}
        if strict and kinds.isdisjoint(config.op_types):
            raise ConfigError(
                f"the model has no operator of type {' or '.join(config.op_types)}:"
                f" nothing would be quantized{nearest(config.op_types[0], kinds)}",
            )
        for node in graph.nodes:
            if node.kind not in config.op_types:
                chosen[node] = NodeSpec(None, None, _OTHER_TYPE)
    if config.nodes:
        wanted = matching(graph, Override(config.nodes, keep=True), strict=strict)
        for node in graph.nodes:
            if node not in wanted:
                chosen[node] = NodeSpec(None, None, _OTHER_NODE)
    present = existing(graph, keep=config.keep_existing)
    for node in graph.nodes:
        if node.name in present:
            chosen[node] = NodeSpec(None, None, present[node.name])
    overrides = list(config.overrides)
    if config.exclude:
        overrides.append(Override(config.exclude, keep=True))
    for override in overrides:
        for node in matching(graph, override, strict=strict):
            if chosen[node].keep in (_OTHER_TYPE, _OTHER_NODE) or node.name in present:
                continue  # an override says how, not whether
            if override.keep:
                chosen[node] = NodeSpec(None, None, EXCLUDED)
            else:
                current = chosen[node]
                chosen[node] = NodeSpec(
                    override.activation or current.activation,
                    override.weight or current.weight,
                    overridden=current.overridden or override.activation is not None,
                )
    return {node: _settled(spec, config) for node, spec in chosen.items()}


def _settled(spec: NodeSpec, config: QConfig) -> NodeSpec:
    """The settings of a node, with what they leave to the operators that will be written."""
    activation, weight = spec.activation, spec.weight
    if activation is not None:
        activation = activation.settled(weight=False, vendor=config.vendor_computes)
    if weight is not None:
        weight = weight.settled(weight=True, vendor=config.vendor_computes)
    return replace(spec, activation=activation, weight=weight)


def looks_up(graph: Graph, node: Node) -> bool:
    """Return whether a node picks rows of a constant table, as embeddings are."""
    if node.kind == "Gather":
        return node.attribute("axis", 0) == 0 and graph.is_constant(node.inputs[0])
    return node.kind == "com.microsoft::EmbedLayerNormalization"


def _check_tensors(graph: Graph, config: QConfig) -> None:
    """Raise an error for the first override of tensors that names none of the graph."""
    known = {
        name
        for node in (*graph.nodes, *inner_nodes(graph.nodes))
        for name in (*node.inputs, *node.outputs)
    }
    if missing := TensorOverrides(config.tensors).unmatched(known):
        raise ConfigError(
            "no tensor of the model matches"
            f" {missing[0]!r}{nearest(missing[0], known)}",
        )


def matching(graph: Graph, override: Override, *, strict: bool) -> dict[Node, None]:
    """Return the nodes that an override speaks of, as an ordered set.

    Raises:
        ConfigError: ``strict``, and a pattern matches nothing; the message has the nearest name.
    """
    found: dict[Node, None] = {}
    names = {node.name: node for node in graph.nodes}
    for pattern in override.nodes:
        hits = [names[name] for name in _by_name(pattern, names)]
        if (
            strict
            and not hits
            and not _by_name(pattern, [node.name for node in inner_nodes(graph.nodes)])
        ):
            raise ConfigError(
                f"no node of the model matches {pattern!r}{_hint(pattern, names)}",
            )
        found.update(dict.fromkeys(hits))
    kinds = {node.kind for node in graph.nodes}
    for op_type in override.op_types:
        if strict and op_type not in kinds | {
            node.kind for node in inner_nodes(graph.nodes)
        }:
            raise ConfigError(
                "the model has no operator of type"
                f" {op_type!r}{nearest(op_type, kinds)}",
            )
        found.update(
            dict.fromkeys(node for node in graph.nodes if node.kind == op_type),
        )
    if override.between:
        starts, ends = override.between
        hits = _between(graph, starts, ends, strict)
        if strict and not hits:
            raise ConfigError(
                f"no node lies between {override.where}; is a start downstream of an"
                " end?",
            )
        found.update(dict.fromkeys(hits))
    return found


def _hint(pattern: str, names: Iterable[str]) -> str:
    """Suggest a glob if a pattern is part of a node's name, else the nearest name."""
    names = list(names)
    plain = not pattern.startswith("re:") and not any(sign in pattern for sign in "*?[")
    hits = [name for name in names if pattern in name] if plain else []
    if not hits or (len(hits) == 1 and "did you mean" in nearest(pattern, hits)):
        return nearest(pattern, names)
    nodes = "1 node" if len(hits) == 1 else f"{len(hits)} nodes"
    return f"; did you mean '*{pattern}*' ({nodes})?"


def _by_name(pattern: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    if pattern in names:
        return [pattern]
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            raise ConfigError(
                f"{pattern!r} is not a valid regular expression: {error}",
            ) from error
        return [name for name in names if expression.search(name)]
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def _between(
    graph: Graph,
    starts: tuple[str, ...],
    ends: tuple[str, ...],
    strict: bool,
) -> list[Node]:
    """Nodes on the paths from ``starts`` to ``ends``."""
    down = reach(_nodes_at(graph, starts, strict, reading=True), graph.followers)
    up = reach(_nodes_at(graph, ends, strict, reading=False), graph.leaders)
    return [node for node in graph.nodes if node in down and node in up]


def _nodes_at(
    graph: Graph,
    names: tuple[str, ...],
    strict: bool,
    *,
    reading: bool,
) -> list[Node]:
    """Nodes by node name, or the readers or the producer of a tensor by tensor name."""
    by_name, result = {node.name: node for node in graph.nodes}, list[Node]()
    for name in names:
        producer = graph.producer(name)
        if name in by_name:
            result.append(by_name[name])
        elif reading and graph.consumers(name):
            result += graph.consumers(name)
        elif not reading and producer is not None:
            result.append(producer)
        elif strict:
            tensors = {
                tensor
                for node in graph.nodes
                for tensor in (*node.inputs, *node.outputs)
            }
            if name in tensors:
                raise ConfigError(
                    f"between: no node {'reads' if reading else 'computes'} {name!r}",
                )
            raise ConfigError(
                f"between: {name!r} is no node or tensor of the"
                f" model{nearest(name, {*by_name, *tensors})}",
            )
    return result
