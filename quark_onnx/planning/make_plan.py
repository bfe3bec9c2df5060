"""The plan: rules and overrides decide the format of every tensor.

Of the other files of this folder, ``make_plan`` calls those that keep a kind of tensor float
(``spare_...``). ``plan_at_opset`` calls it for a run, and ``plan_bodies`` for the bodies of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

import quark_onnx.rules  # noqa: F401
import quark_onnx.targets  # noqa: F401  (importing registers rules and targets)
from quark_onnx.common.registry import DTYPES, RULES, TARGETS
from quark_onnx.config import QConfig, TensorOverrides
from quark_onnx.dtypes import INT16
from quark_onnx.graph import Graph, Node, ShapeArithmetic, overridable, reach
from quark_onnx.graph.shapes import known_sizes
from quark_onnx.graph.states import State, states
from quark_onnx.plan import (
    OVERRIDABLE,
    Asked,
    BiasOf,
    Keep,
    NodeSpec,
    Plan,
    PlanBuilder,
    Quantize,
    SameAs,
    Use,
    looks_up,
    select,
)
from quark_onnx.planning.composites import spare_composites
from quark_onnx.planning.decoding import spare_decoding
from quark_onnx.planning.engine_floats import (
    spare_fused,
    spare_padded_means,
    spare_products,
    spare_results,
)
from quark_onnx.planning.joined_tokens import spare_joined_tokens
from quark_onnx.planning.long_sums import spare_long_sums
from quark_onnx.planning.spare_decisions import spare_decisions
from quark_onnx.planning.states import spare_states
from quark_onnx.rules import WEIGHTED
from quark_onnx.rules.passthrough import HANDING_ON, PARTING, REARRANGING
from quark_onnx.targets.target import Takes

#: The bias types of an engine that takes no biases in codes.
_FLOAT_BIASES = ("float",)
_FLOAT_WEIGHTS = "the target takes its weights in float alone"
_NO_RULE = "no quantization rule for this operator"
#: Operators that may leave out channels.
_CUTTING = PARTING | {"CenterCropPad", "Compress"}
_IMAGE_RANK = 4


def make_plan(  # noqa: PLR0913  what is known of a graph, or of a body
    graph: Graph,
    config: QConfig,
    *,
    strict: bool = True,
    shapes: ShapeArithmetic | None = None,
    recurrent: Sequence[State] | None = None,
    measured: bool = True,
) -> Plan:
    """Return the plan of a graph, before calibration.

    Args:
        graph: the float graph.
        config: the settings.
        strict: require a match for every pattern of the config.
        shapes: tensors that are shape arithmetic; None computes them from the graph; pass them
            for subgraphs.
        recurrent: states that persist from step to step; None for the states that the graph's
            interface declares.
        measured: activations can be measured; otherwise those that need a range stay float.
    """
    target = TARGETS[config.target] if config.target else None
    # An integer engine pools on codes, so that the result of a pool has the scale of the input.
    aligns = target is not None and target.integer_engine
    takes = target.takes if target is not None and target.takes is not None else Takes()
    weight = config.weight
    if aligns and weight is not None and weight.pow2:
        # amd-quark 0.13 writes weights of the engine in the codes -127..127.
        config = config.with_(weight=weight.with_(narrow=True))
    specs = _suited(select(graph, config, strict=strict, measured=measured), takes)
    if config.all_pairs:
        specs = {node: _like_onnxruntime(spec) for node, spec in specs.items()}
    plan = PlanBuilder(
        graph,
        specs,
        safe=config.safe,
        fuses=config.form == "operators",
        aligns=aligns,
        shapes=shapes,
        asked=Asked(
            TensorOverrides(config.tensors),
            config.float_results,
            config.clipping,
            config.follow_inputs,
            config.all_pairs or takes.paired,
            config.all_pairs,
            not config.portable,
            target is None or target.keeps_barriers,
            takes.moves,
        ),
    )
    # A caller may replace such an initializer by a value that calibration has not seen.
    for name in overridable(graph):
        plan.keep(name, OVERRIDABLE)
    # An engine without float arithmetic gains nothing from float tensors between integer operators.
    if config.safe and not (config.npu or takes.paired):
        spare_states(plan, states(graph) if recurrent is None else recurrent)
        spare_long_sums(plan)
        spare_composites(plan)
        spare_joined_tokens(plan)
    _spare_for_engine(plan, takes, safe=config.safe)
    if config.safe:
        spare_decoding(plan)
    spare_decisions(plan)
    for node in graph.nodes:
        _apply_rule(plan, node, movers=config.movers)
    # A rule sees the requests of the nodes before its own; the steps below need those of all nodes.
    # ``_hand_on`` precedes the steps that give float values back to readers, as it would quantize
    # these values again.
    _spare_tied(plan)
    _hand_on(plan)
    _read_floats(plan)
    _store_biases(plan, config.bias if takes.biases != _FLOAT_BIASES else False)
    _lift(plan)
    if aligns:
        _lift_for_engine(plan)
    _spare_float_readers(plan)
    _spare_shapes(plan)
    _calibrate_outputs(plan)
    return plan.build()


def _apply_rule(plan: PlanBuilder, node: Node, *, movers: bool) -> None:
    """Let the rule of a node decide, or keep the node float.

    Args:
        node: the node; the nodes before it are decided.
        movers: request the input of an operator that only moves values.
    """
    excluded = plan.specs[node].keep
    if excluded:
        plan.keep_node(node, excluded)
        return
    # Kept by an earlier step, or by the rule of an earlier node, with the reason.
    if node.name in plan.kept:
        return
    reason = _float_reason(plan, node)
    if reason:
        plan.keep_node(node, reason)
        return
    # The rule of such an operator shares the format of the input with the result, but does not
    # request it. onnxruntime's quantizer does so for a Pad, unless it writes operators on codes.
    requests_input = movers or (
        node.kind == "Pad" and plan.asked.all_pairs and not plan.fuses
    )
    if requests_input and node.kind in HANDING_ON:
        plan.activation(node, node.inputs[0])
    RULES[node.kind](node, plan)


def _float_reason(plan: PlanBuilder, node: Node) -> str:
    """Return why no rule is applied to a node; empty if one is."""
    if node.float_reason and not plan.rounds_results(node):
        return node.float_reason
    if RULES.get(node.kind) is None:
        return _NO_RULE
    return plan.shapes.computed_by(node)


def _suited(specs: dict[Node, NodeSpec], takes: Takes) -> dict[Node, NodeSpec]:
    """Return the settings of nodes for an engine.

    An engine may take some weights with one scale only, and others only in float.
    """
    suited = dict(specs)
    for node, spec in specs.items():
        if node.kind in takes.floats and not spec.keep:
            suited[node] = replace(spec, keep=_FLOAT_WEIGHTS)
        elif (
            takes.channels
            and spec.weight is not None
            and node.kind not in takes.channels
        ):
            dtype = DTYPES[takes.one_scale]
            weight = spec.weight.with_(per_channel=False, dtype=dtype)
            suited[node] = replace(spec, weight=weight)
    return suited


def _like_onnxruntime(spec: NodeSpec) -> NodeSpec:
    """Return settings with the scales that onnxruntime's quantizer gives."""
    activation, weight = spec.activation, spec.weight
    return replace(
        spec,
        activation=None if activation is None else activation.as_onnxruntime,
        weight=None if weight is None else weight.as_onnxruntime,
    )


def _store_biases(plan: PlanBuilder, bias: bool | str) -> None:
    """Store biases in the configured format, or as floats.

    Args:
        bias: ``QConfig.bias``: False for floats, True for int32, or the name "int16".
    """
    for use, entry in plan.entries.items():
        if isinstance(entry, BiasOf):
            # ``bias`` is a flag, or the name of a format.
            dtype = INT16 if bias == INT16.name else entry.dtype
            plan.entries[use] = replace(entry, stored=bool(bias), dtype=dtype)


def _spare_tied(plan: PlanBuilder) -> None:
    """Keep an embedding table float if a float layer multiplies by the table.

    The table is then stored in float anyway.
    """
    graph = plan.graph
    # A dictionary for its order: sets of texts have another order in each process.
    tables = dict[str, None]()
    for node in graph.nodes:
        if node.kind == "Gather" and looks_up(graph, node):
            tables[node.inputs[0]] = None
    # Float layers read the table in float; quantizing the embedding would store it a second time.
    float_layers = [
        node for node in graph.nodes if node.kind in WEIGHTED and node.name in plan.kept
    ]
    for table in tables:
        if not plan.quantized(table):
            continue
        for node in float_layers:
            if any(_tied(graph, table, name) for name in node.inputs):
                plan.keep(
                    table, f"node {node.name!r} has the same values, and stays float"
                )


def _tied(graph: Graph, table: str, tensor: str) -> bool:
    """Return whether a tensor is a constant table, or the transpose of the table."""
    if table == tensor:
        return True
    if not graph.is_constant(tensor):
        return False
    # Shapes are compared first, because constants may have to be read from a file.
    shape = graph.shape(table)
    if shape is None or graph.shape(tensor) != shape[::-1]:
        return False
    rows, columns = graph.known(table), graph.known(tensor)
    # One row first: tables have tens of thousands.
    return bool(
        np.array_equal(rows[0], columns[:, 0]) and np.array_equal(rows, columns.T),
    )


def _hand_on(plan: PlanBuilder) -> None:
    """Pass scales on again, as a later node may have requested an earlier tensor."""
    for node in plan.graph.nodes:
        if node.kind in HANDING_ON and node.name not in plan.kept:
            RULES[node.kind](node, plan)


def _read_floats(plan: PlanBuilder) -> None:
    """Let nodes that a rewrite created for float arithmetic read unrounded values."""
    for node in plan.graph.nodes:
        if node.float_reason and plan.kept.get(node.name) == node.float_reason:
            for tensor in node.inputs:
                plan.keep_for(node, tensor, node.float_reason)
                # A reader with another format would read the rounded values of a ``spoken`` tensor.
                plan.spoken.discard(tensor)


def _lift(plan: PlanBuilder) -> None:
    """Quantize the input of a rearrangement instead of the result, if it is the only reader.

    The rearrangement then moves codes instead of floats.
    """
    graph = plan.graph
    # From the end, so that a chain of rearrangements lifts the pair step by step to its start.
    for node in reversed(graph.nodes):
        if node.kind not in REARRANGING or node.name in plan.kept:
            continue
        source, result = Use(node.inputs[0]), Use(node.outputs[0])
        entry = plan.entries.get(result)
        # Channels have another axis after a Transpose or Reshape.
        if not isinstance(entry, Quantize) or entry.axis is not None:
            continue
        if source in plan.entries or plan.ineligible(source.tensor):
            continue
        # With further readers, the pair before the rearrangement would round what they read in
        # float.
        alone = graph.consumers(source.tensor) == [node]
        if alone and not graph.is_output(source.tensor):
            plan.entries[source], plan.entries[result] = entry, SameAs(source)


def _spare_for_engine(plan: PlanBuilder, takes: Takes, *, safe: bool) -> None:
    """Keep tensors float where the engine of the target is faster in float, or wrong on codes."""
    if safe and takes.fuses:
        spare_fused(plan)
        spare_results(plan)
    if safe and not takes.products:
        spare_products(plan)
    if not takes.padded_means:
        spare_padded_means(plan)


def _lift_for_engine(plan: PlanBuilder) -> None:
    """Quantize what is only moved, as slices of an image, before it is quantized.

    An integer engine moves codes; operators that move floats would run on the processor in front
    of it. amd-quark 0.13 quantizes inputs of the model in front of such operators as well.
    """
    graph = plan.graph
    # From the end: what a chain of operators moves is lifted step by step.
    for node in reversed(graph.nodes):
        if node.kind not in HANDING_ON or Use(node.inputs[0]) in plan.entries:
            continue
        source = node.inputs[0]
        if graph.is_constant(source) or graph.is_output(source):
            continue
        movers = graph.consumers(source)
        results = [
            plan.entry(Use(name)) for mover in movers for name in mover.outputs if name
        ]
        moved_only = all(
            mover.kind in HANDING_ON
            and mover.name not in plan.kept
            and mover.inputs[0] == source
            and not _cuts_channels(graph, mover)
            for mover in movers
        )
        specs = [plan.specs[mover].activation for mover in movers]
        # Channels may have another axis before a Transpose, and the range that the user gives a
        # result is not that of the source.
        alike = all(
            isinstance(result, Quantize)
            and result.axis is None
            and result.given is None
            and all(spec is not None and spec.alike(result.spec) for spec in specs)
            for result in results
        )
        if moved_only and alike and not plan.ineligible(source):
            for mover in movers:
                plan.activation(mover, source)
            for mover in movers:
                RULES[mover.kind](mover, plan)


def _cuts_channels(graph: Graph, node: Node) -> bool:
    """Return whether a node selects channels, whose ranges may be far smaller than others'.

    Channels lie along the second axis of an image, along the last one before a Transpose to that
    layout, and along any but the first of a tensor of lower rank.
    """
    if node.kind not in _CUTTING:
        return False
    sizes = graph.sizes(node.inputs[0])
    channels = slice(1, None)
    if len(sizes) >= _IMAGE_RANK:
        channels = slice(-1, None) if _has_channels_last(graph, node) else slice(1, 2)
    known = known_sizes(sizes[channels])
    return known is None or any(
        len(graph.sizes(name)) != len(sizes)
        or known_sizes(graph.sizes(name)[channels]) != known
        for name in node.results
    )


def _has_channels_last(graph: Graph, node: Node) -> bool:
    """Return whether a Transpose before the next layers moves the last axis to the second place."""
    last = len(graph.sizes(node.inputs[0])) - 1

    def after(member: Node) -> list[Node]:
        is_end = member.kind == "Transpose" or member.kind in WEIGHTED
        return [] if is_end else graph.followers(member)

    return any(
        member.kind == "Transpose"
        and member.attribute("perm", []) == [0, last, *range(1, last)]
        for member in reach([node], after)
    )


def _spare_float_readers(plan: PlanBuilder) -> None:
    """Let a float node read the float value of a tensor if available."""
    # A list, because the loop adds entries.
    tensors = [
        use.tensor
        for use in plan.entries
        if use.node is None and plan.quantized(use.tensor)
    ]
    for tensor in tensors:
        producer = plan.graph.producer(tensor)
        if plan.graph.is_constant(tensor) or (
            producer is not None and producer.name not in plan.kept
        ):
            continue
        for reader in plan.graph.consumers(tensor):
            if reader.name in plan.kept:
                plan.entries[Use(tensor, reader.name)] = Keep(
                    "its reader is a float node and so is its producer",
                )


def _spare_shapes(plan: PlanBuilder) -> None:
    """Let shape arithmetic read unrounded constants and pixels.

    Further consumers of these tensors read rounded values.
    """
    for node in plan.graph.nodes:
        for tensor, reason in plan.shapes.exact_inputs(node, plan.graph.opset).items():
            plan.keep_exact(node, tensor, reason)


def _calibrate_outputs(plan: PlanBuilder) -> None:
    """Use the output calibrator of clipping calibrators after the last weighted layer.

    No later layer sums over many of these values, and a classifier or detector is judged by the
    greatest of them.
    """
    graph = plan.graph
    weighted = graph.nodes_of(WEIGHTED)
    # Weighted layers are no ancestors of themselves: the last ones are not in ``before``.
    before = reach(
        [leader for node in weighted for leader in graph.leaders(node)], graph.leaders
    )
    for use, entry in plan.entries.items():
        producer = graph.producer(use.tensor)
        if not isinstance(entry, Quantize) or producer is None or producer in before:
            continue
        # Calibrators that clip nothing lack the attribute.
        calibrator = getattr(entry.spec.calibrator, "at_outputs", None)
        if calibrator is not None:
            spec = entry.spec.with_(calibrator=calibrator)
            plan.entries[use] = replace(entry, spec=spec)
