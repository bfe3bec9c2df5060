"""opsets: the model at an opset that its formats, the runtime and the target know."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from onnx import TensorProto, defs, helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx.config import QConfig
from quark_onnx.dtypes import BODY_OPSET, INT32, Integer
from quark_onnx.errors import ConfigError, ModelError
from quark_onnx.graph import Graph
from quark_onnx.passes import at_opset, raise_opset, to_opset
from quark_onnx.plan import BiasOf, Plan, Quantize, Use
from quark_onnx.registry import TARGETS
from quark_onnx.steps.prepare import unchanged
from quark_onnx.steps.run import Reference, Sample

#: First opset with Round, which onnxruntime writes when it makes an integer of a float bias beside
#: a quantized weight.
ROUND_OPSET = 11
#: First opset with operators on codes, which onnxruntime makes of others between Q/DQ pairs.
_CODES_OPSET = 10
#: First opset whose Q/DQ nodes take all that ours have but blocks.
_PAIR_OPSET = 13
#: Operators that mean something else from an opset on, unless a converter minds it.
_CHANGED = {11: {"Resize", "Upsample"}, 13: {"Softmax", "LogSoftmax", "Hardmax"}}


@cache
def newest_with_pairs() -> int:
    """The newest opset of which the installed onnxruntime has QuantizeLinear and DequantizeLinear.

    It may load models of newer ones: onnxruntime 1.32 takes opset 28, and has the two up to opset
    27.
    """
    return next(
        (
            opset
            for opset in range(defs.onnx_opset_version(), _PAIR_OPSET, -1)
            if _loads_pairs(opset)
        ),
        _PAIR_OPSET,
    )


def _loads_pairs(opset: int) -> bool:
    scale, x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [])
        for name in ("scale", "x", "y")
    )
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "pair", [x, scale], [y])
    imports = [helper.make_opsetid("", opset)]
    version = helper.find_min_ir_version_for(imports, ignore_unknown=True)
    try:
        open_session(
            helper.make_model(graph, opset_imports=imports, ir_version=version),
        )
    except Exception:  # onnxruntime raises several unrelated types
        return False
    return True


def lower_opset(
    graph: Graph,
    target: str | None,
    reference: Reference,
    sample: Sample | None,
) -> tuple[Graph, list[str]]:
    """The graph at an opset of which the runtime has Q/DQ nodes, and which the target advises, if
    onnx can convert it without changing outputs; what was done, or why not.
    """
    notes = list[str]()
    ceilings = (
        [
            (
                TARGETS[target].opset,
                f"the target {target} advises {TARGETS[target].opset}",
            ),
        ]
        if target
        else []
    )
    newest = newest_with_pairs()
    for ceiling, why in [
        *ceilings,
        (newest, f"onnxruntime has Q/DQ nodes up to {newest}"),
    ]:
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
    inside: Sequence[Quantize] = (),
) -> tuple[Graph, list[str]]:
    """The graph at the least opset that the plan's number formats and onnxruntime's rewrites of
    them need, if onnx can convert it without changing outputs and the config allows for it.

    Otherwise the graph stays as it is, and Q/DQ nodes that its opset lacks are written in the
    com.microsoft domain, which has them at any opset.

    Args:
        inside: what is wanted in the bodies of nodes; it is given up where the opset cannot be
            raised that far.

    Raises:
        ModelError: that domain does not have them either.
        ConfigError: it would, if the config allowed for a higher opset.
    """
    quantized = [
        entry for entry in plan.entries.values() if isinstance(entry, Quantize)
    ]
    vendor = BODY_OPSET if config.form == "vendor" else 0
    biases = [
        entry.alone
        for entry in plan.entries.values()
        if isinstance(entry, BiasOf) and entry.stored
    ]
    wanted = [
        *quantized,
        *inside,
        *(bias for bias in biases if bias.spec.dtype != INT32),
    ]
    needed = (
        max(ROUND_OPSET, vendor, *(entry.min_opset for entry in wanted))
        if wanted
        else 0
    )
    before, limit = graph.opset, config.max_opset or needed
    if (
        config.target
        and not config.max_opset
        and all(contributed(e) and not e.spec.block_size for e in wanted)
    ):
        limit = min(needed, max(before, TARGETS[config.target].opset))
    if needed > limit:
        for entry in wanted:
            if not (entry.min_opset <= limit or contributed(entry)):
                raise ConfigError(
                    f"{entry.spec.dtype.name} needs opset {entry.min_opset}, but"
                    f" max_opset is {limit}; raise it, or choose another format",
                )
        needed = max(
            opset
            for opset in (ROUND_OPSET, vendor, *(e.min_opset for e in wanted))
            if opset <= limit
        )
    if before >= needed:
        _check_not_beyond(graph, plan, vendor=config.form == "vendor")
        return graph, []
    raised = graph
    for opset in sorted(
        {needed, ROUND_OPSET, _CODES_OPSET, *(e.min_opset for e in wanted)},
        reverse=True,
    ):
        candidate = (
            _raised(graph, opset, reference, sample)
            if before < opset <= needed
            else None
        )
        if candidate is not None:
            raised = candidate
            break
    _check_reach(graph, plan, raised.opset, needed)
    notes = (
        [f"opset raised from {before} to {raised.opset}"] if raised is not graph else []
    )
    if any(entry.min_opset > raised.opset for entry in quantized):
        low = f"opset {before} could not be raised to {needed}"
        notes.append(
            f"{low}: operators that it lacks are those of the com.microsoft domain",
        )
    return raised, notes


def _raised(
    graph: Graph,
    opset: int,
    reference: Reference,
    sample: Sample | None,
) -> Graph | None:
    """The graph at another opset.

    None if onnx cannot convert it, or not without changing what it computes.
    """
    kinds = {node.kind for node in graph.nodes}
    if sample is None and any(
        graph.opset < at <= opset and kinds & changed
        for at, changed in _CHANGED.items()
    ):
        return None  # nobody would see it
    converted = raise_opset(graph.to_model(), opset)
    if converted is None:
        return None
    candidate = Graph(converted, store=graph.store)
    same = sample is None or unchanged(candidate, sample, reference.repeatable(sample))
    return candidate if same else None


def _check_not_beyond(graph: Graph, plan: Plan, *, vendor: bool) -> None:
    """Raise an error for a format that only standard Q/DQ nodes write, at an opset of which
    onnxruntime has none.
    """
    newest = newest_with_pairs()
    if graph.opset <= newest:
        return
    for use, entry in plan.entries.items():
        if (
            not isinstance(entry, Quantize)
            or not entry.spec.dtype.scaled
            or entry.spec.dynamic
        ):
            continue
        if vendor or not contributed(entry):
            raise ModelError(
                f"{entry.spec.dtype.name} needs Q/DQ nodes, which onnxruntime has up to"
                f" opset {newest}, and the model's opset {graph.opset} cannot be"
                " lowered without changing its outputs; export the model at opset"
                f" {newest}, or choose another format. {_wanting(graph, use)}",
            )


def _check_reach(graph: Graph, plan: Plan, reached: int, needed: int) -> None:
    """Raise an error that names a node and the obstacle if the opset that a graph can have does not
    do for a plan.
    """
    for use, entry in plan.entries.items():
        if (
            isinstance(entry, Quantize)
            and entry.min_opset > reached
            and not contributed(entry)
        ):
            raise ModelError(
                f"{entry.spec.dtype.name} needs opset {entry.min_opset}, and the"
                f" model's opset {graph.opset} cannot be raised to {needed}; export the"
                " model at that opset, or choose another format."
                f" {_wanting(graph, use)}; {_obstacle(graph, entry.min_opset)}",
            )


def _wanting(graph: Graph, use: Use) -> str:
    """Name the first node that a tensor is quantized for."""
    readers = [
        node for node in graph.consumers(use.tensor) if use.node in (None, node.name)
    ]
    named = (
        f"Node {readers[0].name!r} ({readers[0].op_type}) reads"
        if readers
        else "The model hands out"
    )
    return f"{named} {use.tensor!r}, which is to have that format"


def _obstacle(graph: Graph, opset: int) -> str:
    """Say why a graph cannot be raised to an opset."""
    try:
        to_opset(graph.to_model(), opset)
    except ModelError as error:
        return str(error)
    for first, changed in _CHANGED.items():
        for node in graph.nodes:
            if node.kind in changed and graph.opset < first <= opset:
                return (
                    f"node {node.name!r} ({node.op_type}) means something else from"
                    f" opset {first} on"
                )
    return f"at opset {opset} the model computes something else"


def contributed(entry: Quantize) -> bool:
    """Whether the com.microsoft domain can write it."""
    spec = entry.spec
    return isinstance(spec.dtype, Integer) and spec.dtype.bits >= 4 and not spec.dynamic
