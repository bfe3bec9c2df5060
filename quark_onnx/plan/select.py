"""Select the settings of nodes from the configuration."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass

from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.common.wording import counted
from quark_onnx.config import Override, QConfig, QuantizationSpec, TensorOverrides
from quark_onnx.config.spec import is_dynamic
from quark_onnx.graph import Graph, Node, reach
from quark_onnx.graph.node import inner_nodes, kinds_of
from quark_onnx.plan.existing import existing

#: Reason to keep a node float that an override or ``exclude`` names.
EXCLUDED = "excluded"
_OTHER_TYPE = "its operator type was not asked for"
_OTHER_NODE = "it was not asked for"


@dataclass(frozen=True)
class NodeSpec:
    """The settings of a node.

    Attributes:
        activation: quantization of its activations, None for float.
        weight: quantization of its weights, None for float.
        keep: reason to keep the node float, empty if it is quantized.
        overridden: an override applies to its activations.
    """

    activation: QuantizationSpec | None
    weight: QuantizationSpec | None
    keep: str = ""
    overridden: bool = False

    @property
    def static(self) -> bool:
        """Whether activations are quantized with scales that are known before inference."""
        return self.activation is not None and not self.activation.dynamic

    @property
    def dynamic(self) -> bool:
        """Whether each run computes the scales of the activations."""
        return is_dynamic(self.activation)


def select(
    graph: Graph, config: QConfig, *, strict: bool = True, measured: bool = True
) -> dict[Node, NodeSpec]:
    """Return the settings of each node: the configuration's, changed by matching overrides.

    The last override that matches a node decides whether the node is kept float or quantized. A
    format is that of the last override that gives one, or the configuration's. Overrides cannot
    quantize a node that ``op_types``, ``nodes`` or existing quantization exclude.

    Args:
        graph: the model.
        config: the user's configuration.
        strict: every pattern must match: true for the user's graph, false after folding.
        measured: activations can be measured; otherwise those that need a range stay float.

    Raises:
        ConfigError: a pattern matches nothing in the graph; the message has the nearest name.
    """
    if strict and config.tensors:
        _check_tensors(graph, config)
    excluded = _excluded(graph, config, strict)
    kept = dict(excluded)
    specs = {node: _configured(graph, node, config) for node in graph.nodes}
    for override in _overrides_of(config):
        for node in matching(graph, override, strict=strict):
            if node in excluded:
                continue
            if override.keep:
                kept[node] = EXCLUDED
            else:
                kept.pop(node, None)
                specs[node] = _overridden(specs[node], override)
    return {
        node: NodeSpec(None, None, kept[node])
        if node in kept
        else _settled(spec, config, measured)
        for node, spec in specs.items()
    }


def _configured(graph: Graph, node: Node, config: QConfig) -> NodeSpec:
    """Return the settings of a node without overrides.

    Args:
        node: the node; one that gathers rows of a table gets the settings of tables.
    """
    # Rows of a table reach the following layers unsummed: tables have settings of their own.
    if looks_up(graph, node):
        return NodeSpec(config.activation, config.table)
    return NodeSpec(config.activation, config.weight)


def _overrides_of(config: QConfig) -> list[Override]:
    """Return the overrides of a configuration, and ``exclude`` as the last one.

    The last one takes precedence, so that no override quantizes an excluded node.
    """
    overrides = list(config.overrides)
    if config.exclude:
        overrides.append(Override(config.exclude, keep=True))
    return overrides


def _excluded(graph: Graph, config: QConfig, strict: bool) -> dict[Node, str]:
    """Return the nodes that stay float, with the reason.

    Args:
        strict: one of ``op_types``, and every pattern of ``nodes``, must match.

    Raises:
        ConfigError: ``strict``, and a pattern matches nothing.
        ModelError: the model is quantized in part, and ``keep_existing`` is false.
    """
    excluded: dict[Node, str] = {}
    if config.op_types:
        if strict:
            _check_any_type(graph, config.op_types)
        chosen = set(graph.nodes_of(config.op_types))
        others = [node for node in graph.nodes if node not in chosen]
        excluded |= dict.fromkeys(others, _OTHER_TYPE)
    if config.nodes:
        wanted = matching(graph, Override(config.nodes, keep=True), strict=strict)
        others = [node for node in graph.nodes if node not in wanted]
        excluded |= dict.fromkeys(others, _OTHER_NODE)
    # Merged last: the reason of existing quantization replaces the other reasons.
    nodes = {node.name: node for node in graph.nodes}
    present = existing(graph, keep=config.keep_existing)
    return excluded | {nodes[name]: reason for name, reason in present.items()}


def _check_any_type(graph: Graph, op_types: tuple[str, ...]) -> None:
    """Raise ConfigError if the model has no operator of any of some types.

    A type that occurs in bodies alone is no mistake: the plan of each body selects again.
    """
    kinds = kinds_of((*graph.nodes, *inner_nodes(graph.nodes)))
    if kinds.isdisjoint(op_types):
        raise ConfigError(
            f"the model has no operator of type {' or '.join(op_types)}:"
            f" nothing would be quantized{nearest(op_types[0], kinds)}",
        )


def _overridden(spec: NodeSpec, override: Override) -> NodeSpec:
    """Return the settings of a node with the formats that an override gives."""
    return NodeSpec(
        override.activation or spec.activation,
        override.weight or spec.weight,
        overridden=spec.overridden or override.activation is not None,
    )


def _settled(spec: NodeSpec, config: QConfig, measured: bool) -> NodeSpec:
    """Resolve the settings that depend on the operators to be written.

    Args:
        spec: the settings of a node after all overrides.
    """
    activation = spec.activation
    weight = spec.weight
    if activation is not None and activation.measured and not measured:
        activation = None
    if activation is not None:
        # The rule for shared exponents "auto" depends on the operator that computes the format.
        activation = activation.settled(weight=False, vendor=config.vendor_computes)
    if weight is not None:
        weight = weight.settled(weight=True, vendor=config.vendor_computes)
    return NodeSpec(
        activation, weight, overridden=spec.overridden and activation is not None
    )


def looks_up(graph: Graph, node: Node) -> bool:
    """Return whether a node gathers rows of a constant table, as embeddings do."""
    # Only rows (axis 0) are embeddings; a gathered column is a selection of channels.
    if node.kind == "Gather":
        return node.attribute("axis", 0) == 0 and graph.is_constant(node.inputs[0])
    return node.kind == "com.microsoft::EmbedLayerNormalization"


def _check_tensors(graph: Graph, config: QConfig) -> None:
    """Raise an error for the first tensor override without a match in the graph."""
    if not config.tensors:
        return
    nodes = [*graph.nodes, *inner_nodes(graph.nodes)]
    known = _tensors_of(nodes)
    missing = TensorOverrides(config.tensors).unmatched(known)
    if missing:
        raise ConfigError(
            f"no tensor of the model matches {missing[0]!r}{nearest(missing[0], known)}"
        )
    for override in config.tensors:
        if not override.readers:
            continue
        reading = {
            node.name for node in nodes if any(map(override.matches, node.inputs))
        }
        for reader in override.readers:
            if reader not in reading:
                raise ConfigError(
                    f"readers of {override.where}: no node {reader!r} reads"
                    f" {' or '.join(override.tensors)}{nearest(reader, reading)}"
                )


def matching(graph: Graph, override: Override, *, strict: bool) -> dict[Node, None]:
    """Return the nodes that an override matches, as an ordered set.

    Args:
        graph: the model.
        override: patterns of names, operator types, or paths between nodes.
        strict: every pattern must match.

    Raises:
        ConfigError: ``strict``, and a pattern matches nothing; the message has the nearest name.
    """
    matched = [
        *_named(graph, override.nodes, strict),
        *_of_types(graph, override.op_types, strict),
        *_on_paths(graph, override, strict),
    ]
    return dict.fromkeys(matched)


def _named(graph: Graph, patterns: Iterable[str], strict: bool) -> list[Node]:
    """Return the nodes whose names match a pattern, pattern by pattern.

    Args:
        patterns: names, globs, or regular expressions after "re:".
        strict: every pattern must match a node, of a body at least.

    Raises:
        ConfigError: ``strict``, and a pattern matches nothing.
    """
    nodes = {node.name: node for node in graph.nodes}
    matched = list[Node]()
    for pattern in patterns:
        names = _matches(pattern, nodes)
        if strict and not names:
            _check_matches_inside(graph, pattern, nodes)
        matched += [nodes[name] for name in names]
    return matched


def _check_matches_inside(graph: Graph, pattern: str, names: Iterable[str]) -> None:
    """Raise ConfigError unless a pattern matches a node in a subgraph."""
    if not _matches(pattern, [node.name for node in inner_nodes(graph.nodes)]):
        raise ConfigError(
            f"no node of the model matches {pattern!r}{_hint(pattern, names)}",
        )


def _of_types(graph: Graph, op_types: Iterable[str], strict: bool) -> list[Node]:
    """Return the nodes of operator types, type by type.

    Args:
        strict: every type must occur, in a body at least.

    Raises:
        ConfigError: ``strict``, and a type does not occur.
    """
    matched = list[Node]()
    for op_type in op_types:
        nodes = graph.nodes_of((op_type,))
        if strict and not nodes:
            _check_type_inside(graph, op_type)
        matched += nodes
    return matched


def _check_type_inside(graph: Graph, op_type: str) -> None:
    """Raise ConfigError unless a subgraph has an operator of a type."""
    if op_type not in kinds_of(inner_nodes(graph.nodes)):
        kinds = kinds_of(graph.nodes)
        raise ConfigError(
            f"the model has no operator of type {op_type!r}{nearest(op_type, kinds)}",
        )


def _on_paths(graph: Graph, override: Override, strict: bool) -> list[Node]:
    """Return the nodes between the two ends of an override.

    Args:
        override: the override; one without ``between`` matches no node here.
        strict: both ends must exist, and a node must lie between.

    Raises:
        ConfigError: ``strict``, and an end is unknown or no node lies between.
    """
    if not override.between:
        return []
    starts, ends = override.between
    hits = _between(graph, starts, ends, strict)
    if strict and not hits:
        raise ConfigError(
            f"no node lies between {override.where}; is a start downstream of an end?",
        )
    return hits


def _hint(pattern: str, names: Iterable[str]) -> str:
    """Suggest a glob if a pattern is part of a node's name, else the nearest name.

    Args:
        pattern: the pattern without a match.

    Returns:
        The end of an error message; empty without a suggestion.
    """
    names = list(names)
    # A pattern with wildcards has already been tried as one.
    if _has_wildcards(pattern):
        return nearest(pattern, names)
    hits = [name for name in names if pattern in name]
    # The name itself is a better suggestion than a glob for this name alone.
    is_near = len(hits) == 1 and "did you mean" in nearest(pattern, hits)
    if not hits or is_near:
        return nearest(pattern, names)
    return f"; did you mean '*{pattern}*' ({counted(len(hits), 'node')})?"


def _has_wildcards(pattern: str) -> bool:
    """Return whether a pattern is a regular expression or a glob, and no plain name."""
    return pattern.startswith("re:") or not set("*?[").isdisjoint(pattern)


def _matches(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches, in their order.

    Args:
        pattern: a name, a glob, or ``"re:"`` with a regular expression.

    Raises:
        ConfigError: the regular expression is not valid.
    """
    names = list(names)
    # Names come first: a name that holds brackets would not match itself as a glob.
    if pattern in names:
        return [pattern]
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            raise ConfigError(
                f"{pattern!r} is not a valid regular expression: {error}",
            ) from error
        return list(filter(expression.search, names))
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def _between(
    graph: Graph, starts: tuple[str, ...], ends: tuple[str, ...], strict: bool
) -> list[Node]:
    """Return the nodes on the paths between names of nodes or tensors, in graph order.

    Tensors stand for their readers in ``starts``, and for their producers in ``ends``.
    """
    # A node lies between if a start reaches it, and if it reaches an end; both include their
    # origins.
    down = reach(_nodes_at(graph, starts, strict, reading=True), graph.followers)
    up = reach(_nodes_at(graph, ends, strict, reading=False), graph.leaders)
    return [node for node in graph.nodes if node in down and node in up]


def _nodes_at(
    graph: Graph, names: tuple[str, ...], strict: bool, *, reading: bool
) -> list[Node]:
    """Return nodes by name, or the readers or the producer of a tensor by its name.

    Args:
        strict: every name must stand for a node.
        reading: a tensor stands for its readers, otherwise for its producer.

    Raises:
        ConfigError: ``strict``, and a name stands for no node.
    """
    nodes = {node.name: node for node in graph.nodes}
    result = list[Node]()
    for name in names:
        if name in nodes:
            result.append(nodes[name])
            continue
        beside = _nodes_beside(graph, name, reading=reading)
        if strict and not beside:
            raise _unknown_end(graph, name, reading=reading)
        result += beside
    return result


def _nodes_beside(graph: Graph, tensor: str, *, reading: bool) -> list[Node]:
    """Return the readers of a tensor, or its producer, if there is one."""
    if reading:
        return graph.consumers(tensor)
    producer = graph.producer(tensor)
    return [] if producer is None else [producer]


def _unknown_end(graph: Graph, name: str, *, reading: bool) -> ConfigError:
    """Return the error for a start or an end of ``between`` that stands for no node.

    Args:
        name: the start, if ``reading``, or the end.
        reading: the name was to be that of a node, or of a tensor that a node reads.
    """
    tensors = _tensors_of(graph.nodes)
    # A graph input as an end has no producer, and an output as a start no reader.
    if name in tensors:
        verb = "reads" if reading else "computes"
        return ConfigError(f"between: no node {verb} {name!r}")
    known = tensors.union(node.name for node in graph.nodes)
    return ConfigError(
        f"between: {name!r} is no node or tensor of the model{nearest(name, known)}",
    )


def _tensors_of(nodes: Iterable[Node]) -> set[str]:
    """Return the names of the tensors that nodes read or compute."""
    return {name for node in nodes for name in (*node.inputs, *node.outputs)}
