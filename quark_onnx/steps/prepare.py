"""prepare: clean the float graph, and check by running it that it still computes the same."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from quark_onnx.config import QConfig
from quark_onnx.dtypes import BODY_OPSET, Integer
from quark_onnx.errors import ConfigError, ModelError, QuarkError
from quark_onnx.graph import Graph
from quark_onnx.passes import CLEANING, LEGALIZING, Pass, raise_opset
from quark_onnx.plan import Plan, Quantize
from quark_onnx.steps.run import Reference, Sample, agree, run

logger = logging.getLogger(__name__)

#: First opset with Round, which onnxruntime writes when it makes an integer of a float bias beside a quantized weight.
ROUND_OPSET = 11
#: First opset with operators on codes, which onnxruntime makes of others between Q/DQ pairs.
_CODES_OPSET = 10
#: Operators that mean something else from an opset on, unless a converter minds it.
_CHANGED = {11: {"Resize", "Upsample"}, 13: {"Softmax", "LogSoftmax", "Hardmax"}}


def prepare(graph: Graph, config: QConfig, reference: Reference, sample: Sample | None) -> tuple[Graph, list[str]]:
    """The cleaned graph, and notes for the report: what was rewritten, and which pass was rolled back.

    Without a sample nothing can be verified, and the graph stays as it is.
    """
    if sample is None:
        return graph, ["the model runs on no random sample: nothing could be verified, the float graph was not cleaned"]
    if not config.prepare:
        reference.outputs(sample)  # a model that does not run is nothing to begin with
        return graph, []
    return rewritten(graph, LEGALIZING if config.target else CLEANING, reference, sample)


def rewritten(graph: Graph, passes: Sequence[Pass], reference: Reference, sample: Sample) -> tuple[Graph, list[str]]:
    """The graph behind some passes, and what they did.

    All passes run at once and are verified together on ``sample``. Only if the outputs have changed, they run again one
    by one, each verified, and those that changed them are left out.

    Raises:
        ModelError: the reference does not run on the sample.
    """
    expected = reference.outputs(sample)
    cleaned, notes = clean(graph, passes)
    if not notes or unchanged(cleaned, sample, expected):
        return cleaned, notes
    expected = reference.repeatable(sample)
    if unchanged(cleaned, sample, expected):
        return cleaned, notes
    notes = list[str]()
    for single in passes:
        candidate, done = clean(graph, (single,))
        if not done:
            continue
        if unchanged(candidate, sample, expected):
            graph, notes = candidate, notes + done
        else:
            notes.append(f"{single.__name__} changed the outputs and was rolled back")
            logger.warning("pass %s changed the outputs of the model; it was rolled back", single.__name__)
    return graph, notes


def clean(graph: Graph, passes: Sequence[Pass]) -> tuple[Graph, list[str]]:
    """A rewritten copy and what was done; a pass that fails is left out, as if it had never begun."""
    result, notes = graph.copy(), list[str]()
    for single in passes:
        try:
            count = single(result)
        except Exception as error:  # a defect of a pass must not cost the user the model
            logger.warning("pass %s failed (%s); it was left out", single.__name__, error)
            result, notes = clean(graph, [other for other in passes if other is not single])
            return result, [*notes, f"{single.__name__} failed: {error}"]
        if count:
            result.drop_unused()
            result.infer()
            notes.append(f"{single.__name__}: {count}")
    return result, notes


def unchanged(graph: Graph, sample: Sample, expected: dict[str, object]) -> bool:
    """Whether a rewritten graph computes what is expected on a sample, but for rounding."""
    try:
        found = run(graph.to_model(), sample)
    except QuarkError as error:
        logger.warning("the rewritten model does not run: %s", error)
        return False
    return found.keys() >= expected.keys() and all(agree(expected[name], found[name]) for name in expected)


def raise_opset_for(
    graph: Graph,
    plan: Plan,
    config: QConfig,
    reference: Reference,
    sample: Sample | None,
    inside: Sequence[Quantize] = (),
) -> tuple[Graph, list[str]]:
    """The graph at the least opset that the plan's number formats and onnxruntime's rewrites of them need, if onnx can
    convert it without changing outputs and the config allows for it.

    Otherwise the graph stays as it is, and Q/DQ nodes that its opset lacks are written in the com.microsoft domain,
    which has them at any opset.

    Args:
        inside: what is wanted in the bodies of nodes; it is given up where the opset cannot be raised that far.

    Raises:
        ModelError: that domain does not have them either.
        ConfigError: it would, if the config allowed for a higher opset.
    """
    quantized = [entry for entry in plan.entries.values() if isinstance(entry, Quantize)]
    vendor = BODY_OPSET if config.form == "vendor" else 0
    wanted = [*quantized, *inside]
    needed = max(ROUND_OPSET, vendor, *(entry.min_opset for entry in wanted)) if wanted else 0
    before, limit = graph.opset, config.max_opset or needed
    if needed > limit:
        for entry in wanted:
            if not (entry.min_opset <= limit or contributed(entry)):
                raise ConfigError(
                    f"{entry.spec.dtype.name} needs opset {entry.min_opset}, but max_opset is {limit}; raise it, or "
                    "choose another format"
                )
        needed = max(opset for opset in (ROUND_OPSET, vendor, *(e.min_opset for e in wanted)) if opset <= limit)
    if before >= needed:
        return graph, []
    raised = graph
    for opset in sorted({needed, ROUND_OPSET, _CODES_OPSET, *(e.min_opset for e in wanted)}, reverse=True):
        candidate = _raised(graph, opset, reference, sample) if before < opset <= needed else None
        if candidate is not None:
            raised = candidate
            break
    for entry in quantized:
        if entry.min_opset > raised.opset and not contributed(entry):
            raise ModelError(
                f"{entry.spec.dtype.name} needs opset {entry.min_opset}, and the model's opset {before} cannot be "
                f"raised to {needed}; export the model at that opset, or choose another format"
            )
    notes = [f"opset raised from {before} to {raised.opset}"] if raised is not graph else []
    if any(entry.min_opset > raised.opset for entry in quantized):
        low = f"opset {before} could not be raised to {needed}"
        notes.append(f"{low}: Q/DQ nodes that it lacks use the com.microsoft domain")
    return raised, notes


def _raised(graph: Graph, opset: int, reference: Reference, sample: Sample | None) -> Graph | None:
    """The graph at another opset; None if onnx cannot convert it, or not without changing what it computes."""
    kinds = {node.kind for node in graph.nodes}
    if sample is None and any(graph.opset < at <= opset and kinds & changed for at, changed in _CHANGED.items()):
        return None  # nobody would see it
    converted = raise_opset(graph.to_model(), opset)
    if converted is None:
        return None
    candidate = Graph(converted, store=graph.store)
    same = sample is None or unchanged(candidate, sample, reference.repeatable(sample))
    return candidate if same else None


def contributed(entry: Quantize) -> bool:
    """Whether the com.microsoft domain can write it."""
    spec = entry.spec
    return isinstance(spec.dtype, Integer) and spec.dtype.bits >= 4 and not spec.block_size and not spec.dynamic
