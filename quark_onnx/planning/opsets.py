"""The model's opset, chosen for formats, runtime and target.

``raise_opset_for`` is called by ``plan_at_opset`` with plans that others made; no plan is made
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from onnx import TensorProto, defs, helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.common.registry import TARGETS
from quark_onnx.config import QConfig
from quark_onnx.dtypes import BODY_OPSET, INT32
from quark_onnx.graph import Graph, Node
from quark_onnx.passes import at_opset, raise_opset, to_opset
from quark_onnx.plan import BiasOf, Plan, Quantize, Use
from quark_onnx.planning.prepare import unchanged
from quark_onnx.running.run import Reference, Sample

#: First opset with Round, which onnxruntime inserts to convert a float bias of a quantized
#: layer to integers.
ROUND_OPSET = 11
#: First opset with the operators on codes that onnxruntime fuses Q/DQ pairs into.
_CODES_OPSET = 10
#: First opset whose Q/DQ nodes have every attribute in use here except blocks.
_PAIR_OPSET = 13
#: Opset that all targets and runtimes in use read, which Ryzen AI advises.
_WIDELY_READ = 17
#: Operators whose meaning changes at an opset; a converter must rewrite them.
_CHANGED = {11: {"Resize", "Upsample"}, 13: {"Softmax", "LogSoftmax", "Hardmax"}}


@cache
def newest_with_pairs() -> int:
    """Return the newest opset with Q/DQ nodes in the installed onnxruntime.

    onnxruntime may load models of newer opsets: 1.32 accepts opset 28, and has Q/DQ nodes up to
    opset 27.
    """
    # From the newest down: the first that loads is the answer, mostly after one session.
    for opset in range(defs.onnx_opset_version(), _PAIR_OPSET, -1):
        if loads_pairs(opset):
            return opset
    return _PAIR_OPSET


def loads_pairs(opset: int) -> bool:
    """Return whether onnxruntime loads a Q/DQ pair of an opset.

    Args:
        opset: the opset, also one that the installed onnx does not know.
    """
    scale, x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [])
        for name in ("scale", "x", "y")
    )
    # Without a zero point, the codes are uint8.
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "pair", [x, scale], [y])
    imports = [helper.make_opsetid("", opset)]
    # The least IR version: onnxruntime refuses models of IR versions that it does not know.
    version = helper.find_min_ir_version_for(imports, ignore_unknown=True)
    try:
        open_session(
            helper.make_model(graph, opset_imports=imports, ir_version=version),
        )
    except Exception:  # onnxruntime raises several unrelated types
        return False
    return True


def lower_opset(
    graph: Graph, target: str | None, reference: Reference, sample: Sample | None
) -> tuple[Graph, list[str]]:
    """Lower the opset to one with Q/DQ nodes in the runtime, as the target advises.

    The graph is unchanged if onnx cannot convert it without changing outputs.

    Args:
        graph: the float graph.
        target: name of the target; None for none.
        reference: the float model.
        sample: a sample for the comparison; None for none.

    Returns:
        The graph, and notes: the conversion, or why it failed.
    """
    notes = list[str]()
    newest = newest_with_pairs()
    ceilings = [(newest, f"onnxruntime has Q/DQ nodes up to {newest}")]
    # The advice of the target comes first. If the model cannot follow it, the limit of the runtime
    # holds.
    if target:
        advised = TARGETS[target].opset
        ceilings.insert(0, (advised, f"the target {target} advises {advised}"))
    for ceiling, why in ceilings:
        # The limit of the runtime is the higher one, so that it holds, too.
        if graph.opset <= ceiling:
            break
        try:
            lowered = at_opset(graph, ceiling)
        except ModelError as error:
            notes.append(f"{why}; the model stays at opset {graph.opset}: {error}")
            continue
        if sample is None or unchanged(lowered, sample, reference.repeatable(sample)):
            return lowered, [
                *notes,
                f"opset lowered from {graph.opset} to {ceiling}: {why}",
            ]
        notes.append(
            f"{why}; the model stays at opset {graph.opset}: at {ceiling} it computes"
            " something else",
        )
    return graph, notes


def raise_opset_for(  # noqa: PLR0913
    graph: Graph,
    plan: Plan,
    config: QConfig,
    reference: Reference,
    sample: Sample | None,
    in_bodies: Sequence[Quantize] = (),
) -> tuple[Graph, list[str]]:
    """Raise the opset to the minimum for the plan's formats and onnxruntime's rewrites.

    The graph is unchanged if the config forbids a higher opset, or if onnx cannot convert the
    graph without changing outputs. Q/DQ nodes that the opset lacks are then written in the
    com.microsoft domain, which has them at every opset.

    Args:
        graph: the float graph.
        plan: the plan of the graph.
        config: the settings.
        reference: the float model.
        sample: a sample for the comparison; None for none.
        in_bodies: quantized tensors in bodies, given up if the opset cannot be raised far enough.

    Returns:
        The graph, and notes for the report.

    Raises:
        ModelError: the com.microsoft domain lacks the format as well.
        ConfigError: a higher opset would help, and the config forbids it.
    """
    # The vendor's operators run in onnxruntime by function bodies, whose operators need this opset.
    vendor = BODY_OPSET if config.form == "vendor" else 0
    wanted = [*_written(plan), *in_bodies]
    minimums = [entry.min_opset for entry in wanted]
    opsets = (ROUND_OPSET, vendor, *minimums)
    # A plan without formats needs no opset.
    needed = 0
    if wanted:
        needed = max(opsets)
    before, limit = graph.opset, config.max_opset or needed
    if config.npu and not config.max_opset and all(map(_is_at_every_opset, wanted)):
        # The com.microsoft domain has these formats at every opset: the advice of the target wins.
        limit = min(needed, max(before, TARGETS[config.npu].opset))
    if needed > limit:
        _check_allowed(wanted, limit)
        # The greatest requirement within the limit; operators beyond it are those of com.microsoft.
        needed = max(opset for opset in opsets if opset <= limit)
    if before >= needed:
        _check_not_beyond(graph, plan, vendor=config.form == "vendor")
        return graph, []
    # Lower opsets serve some of the formats where the conversion to the highest one fails.
    targets = {needed, ROUND_OPSET, _CODES_OPSET, *minimums}
    candidates = sorted(opset for opset in targets if before < opset <= needed)
    raised = _first_raised(graph, candidates[::-1], reference, sample)
    _check_reach(graph, plan, raised.opset, needed)
    notes = list[str]()
    # Up to there, nothing that reads the model is known to mind.
    if raised.opset > max(before, _WIDELY_READ):
        notes.append(f"opset raised from {before} to {raised.opset}")
    if any(
        isinstance(entry, Quantize) and entry.min_opset > raised.opset
        for entry in plan.entries.values()
    ):
        notes.append(
            f"opset {before} could not be raised to {needed}: operators that it lacks"
            " are those of the com.microsoft domain",
        )
    return raised, notes


def _written(plan: Plan) -> list[Quantize]:
    """Return the quantized tensors, and the stored biases of other types than int32."""
    entries = plan.entries.values()
    quantized = [entry for entry in entries if isinstance(entry, Quantize)]
    for entry in entries:
        # DequantizeLinear takes int32 at every opset, int16 from a later one on.
        if isinstance(entry, BiasOf) and entry.stored and entry.dtype != INT32:
            quantized.append(entry.alone)
    return quantized


def _is_at_every_opset(entry: Quantize) -> bool:
    """Return whether the com.microsoft domain can write an entry at every opset."""
    return entry.contributed and not entry.spec.block_size


def _check_allowed(entries: Sequence[Quantize], limit: int) -> None:
    """Raise an error for a format that no domain has at the highest opset allowed.

    Raises:
        ConfigError: the first such format needs a higher opset.
    """
    for entry in entries:
        if entry.min_opset > limit and not entry.contributed:
            raise ConfigError(
                f"{entry.spec.dtype.name} needs opset {entry.min_opset}, but"
                f" max_opset is {limit}; raise it, or choose another format",
            )


def _first_raised(
    graph: Graph, opsets: Sequence[int], reference: Reference, sample: Sample | None
) -> Graph:
    """Return the graph at the first opset that keeps its outputs; ``graph`` if none does."""
    for opset in opsets:
        candidate = _raised(graph, opset, reference, sample)
        if candidate is not None:
            return candidate
    return graph


def _raised(
    graph: Graph, opset: int, reference: Reference, sample: Sample | None
) -> Graph | None:
    """Return the graph at another opset.

    Args:
        graph: the float graph; not changed.
        sample: a sample for the comparison; without it, an operator whose meaning changes on the
            way forbids the conversion.

    Returns:
        The graph; None if onnx cannot convert it without changing its outputs.
    """
    # Without a sample, a change of meaning would go unnoticed.
    if sample is None and _changed_meaning(graph, opset) is not None:
        return None
    converted = raise_opset(graph.to_model(), opset)
    if converted is None:
        return None
    # The converted graph keeps the store of weights in files.
    candidate = Graph(converted, store=graph.store)
    same = sample is None or unchanged(candidate, sample, reference.repeatable(sample))
    return candidate if same else None


def _check_not_beyond(graph: Graph, plan: Plan, *, vendor: bool) -> None:
    """Raise an error for a format that needs Q/DQ nodes of an unsupported opset.

    Args:
        graph: the float graph, at the opset of the result.
        vendor: the vendor's operators are written, whose bodies need Q/DQ nodes of ONNX.

    Raises:
        ModelError: the opset is newer than onnxruntime's Q/DQ nodes, and the com.microsoft domain
            lacks the format.
    """
    newest = newest_with_pairs()
    if graph.opset <= newest:
        return
    for use, entry in plan.entries.items():
        if (
            # Formats without a scale, and dynamic scales, need no QuantizeLinear.
            not isinstance(entry, Quantize)
            or not entry.spec.dtype.scaled
            or entry.spec.dynamic
        ):
            continue
        if vendor or not entry.contributed:
            raise ModelError(
                f"{entry.spec.dtype.name} needs Q/DQ nodes, which onnxruntime has up to"
                f" opset {newest}, and the model's opset {graph.opset} cannot be"
                " lowered without changing its outputs; export the model at opset"
                f" {newest}, or choose another format. {_wanting(graph, use)}",
            )


def _check_reach(graph: Graph, plan: Plan, reached: int, needed: int) -> None:
    """Raise an error if the reachable opset is too low for the plan.

    Args:
        graph: the float graph, before it was raised.
        reached: the opset of the raised graph.
        needed: the opset that was wanted.

    Raises:
        ModelError: a format needs a higher opset; the message names a node and the obstacle.
    """
    for use, entry in plan.entries.items():
        if (
            isinstance(entry, Quantize)
            and entry.min_opset > reached
            and not entry.contributed
        ):
            raise ModelError(
                f"{entry.spec.dtype.name} needs opset {entry.min_opset}, and the"
                f" model's opset {graph.opset} cannot be raised to {needed}; export the"
                " model at that opset, or choose another format."
                f" {_wanting(graph, use)}; {_obstacle(graph, entry.min_opset)}",
            )


def _wanting(graph: Graph, use: Use) -> str:
    """Return the name of a tensor's first quantized consumer."""
    readers = [
        node for node in graph.consumers(use.tensor) if use.node in (None, node.name)
    ]
    if readers:
        named = f"Node {readers[0].name!r} ({readers[0].op_type}) reads"
    else:
        named = "The model hands out"
    return f"{named} {use.tensor!r}, which is to have that format"


def _obstacle(graph: Graph, opset: int) -> str:
    """Return why a graph cannot be raised to an opset, without a full stop."""
    try:
        to_opset(graph.to_model(), opset)
    except ModelError as error:
        return str(error)
    # Conversion succeeds here, so that the outputs were found, or suspected, to change.
    change = _changed_meaning(graph, opset)
    if change is not None:
        changed_at, node = change
        return (
            f"node {node.name!r} ({node.op_type}) means something else from opset"
            f" {changed_at} on"
        )
    return f"at opset {opset} the model computes something else"


def _changed_meaning(graph: Graph, opset: int) -> tuple[int, Node] | None:
    """Return the opset at which an operator changes its meaning, and a node of this operator.

    None if no operator of the graph changes its meaning up to ``opset``.
    """
    for changed_at, kinds in _CHANGED.items():
        if not graph.opset < changed_at <= opset:
            continue
        for node in graph.nodes:
            if node.kind in kinds:
                return changed_at, node
    return None
