"""Cleanup of the float graph, verified by inference."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from quark_onnx.check.static_shapes import fixed
from quark_onnx.common.errors import QuarkError
from quark_onnx.common.registry import TARGETS
from quark_onnx.config import QConfig
from quark_onnx.dtypes import Integer
from quark_onnx.graph import Graph
from quark_onnx.graph.bodies import Extracted, in_bodies
from quark_onnx.passes import (
    CANONICALIZE,
    CLEANING,
    LEGALIZING,
    LOWER,
    Pass,
    batch_norm_to_conv,
    hard_swish_to_gate,
    padded_means_to_conv,
    write_ranks,
)
from quark_onnx.running.run import Reference, Sample, agree, run
from quark_onnx.targets import Target, format_of

logger = logging.getLogger(__name__)

#: Rounds of passes after which a graph is taken as it is.
_MOST_ROUNDS = 100


def prepare(
    graph: Graph, config: QConfig, reference: Reference, sample: Sample | None
) -> tuple[Graph, list[str]]:
    """Return the cleaned graph, and notes on rewrites and rolled-back passes.

    Nodes that no output depends on are dropped without a note: the written file never has them,
    and no later stage plans, measures or optimizes them.

    Args:
        graph: the float graph; not changed.
        config: the settings, with the target and the choice of ``prepare``.
        reference: the float model.
        sample: a sample for the verification; without it, verification is impossible and the
            graph keeps its form.

    Raises:
        ModelError: the float model does not run on the sample.
    """
    if graph.unused():
        graph = graph.copy()
        graph.drop_unused()
    if sample is None:
        return graph, [
            (
                "the model runs on no random sample: nothing could be verified, the"
                " float graph was not cleaned"
            ),
        ]
    if not config.prepare:
        reference.outputs(sample)  # fail early if the float model does not run
        return graph, []
    if config.npu:
        passes = passes_for(TARGETS[config.npu], format_of(config), LEGALIZING)
        graph, notes = settled(graph, passes, reference, sample)
    else:
        passes = CLEANING
        # The settings count the axes of a tensor from its own rank.
        if all(override.axis is None for override in config.tensors):
            passes = (*passes, write_ranks)
        if _runs_on_integers(config):
            passes = (*passes, batch_norm_to_conv)
        takes = TARGETS[config.target].takes if config.target else None
        if takes is not None and not takes.padded_means and not _names_means(config):
            passes = (*passes, padded_means_to_conv)
        graph, notes = rewritten(graph, passes, reference, sample)
    # Sizes that have become constants determine those of the outputs.
    graph, sized = fixed(graph) if config.fixes_sizes else (graph, [])
    return graph, [*notes, *sized]


def _runs_on_integers(config: QConfig) -> bool:
    """Return whether a convolution runs on integers, with a scale per channel, and any is to.

    A BatchNormalization has no kernel on integers, and OpenVINO 2026.4 crashes on one after a
    Concat of codes. As a convolution it has one weight per channel, which codes represent exactly.
    """
    activation, weight = config.activation, config.weight
    if activation is None or activation.dynamic or weight is None:
        return False
    # A decision for the operator type BatchNormalization would miss the convolution.
    if config.op_types or any(override.op_types for override in config.overrides):
        return False
    return isinstance(activation.dtype, Integer) and weight.per_channel


def _names_means(config: QConfig) -> bool:
    """Return whether a decision for operator types would miss a mean written as a convolution."""
    chosen = frozenset(config.op_types)
    if chosen and not chosen >= {"AveragePool", "Conv"}:
        return True
    return any("AveragePool" in override.op_types for override in config.overrides)


def passes_for(target: Target, kind: str, passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Return the passes that serve a target in a number format.

    A HardSwish stays where a HardSigmoid in its place would run on the CPU: the compiler of X2 has
    HardSwish in XINT8 and no gates, and BF16 has neither (documentation of Ryzen AI 1.8,
    ops_support.rst; AMD's logs of MobileNetV3).

    Args:
        target: the device.
        kind: the number format, as ``format_of`` names it; empty if unknown.
        passes: the passes to choose from.
    """
    stays = kind == "BF16" or (kind == "XINT8" and target.compiler == "X2")
    return tuple(step for step in passes if not (stays and step is hard_swish_to_gate))


def prepare_again(
    graph: Graph, config: QConfig, sample: Sample | None
) -> tuple[Graph, list[str]]:
    """Rewrite for the target what stages after ``prepare`` have added, and return notes.

    Args:
        graph: the float graph after optimizers and a change of the opset; not changed.
        config: the settings, with the target.
        sample: as for ``prepare``.

    Returns:
        The graph, the same one where nothing was to be rewritten, and notes.
    """
    if sample is None or not config.npu or not config.prepare:
        return graph, []
    passes = passes_for(TARGETS[config.npu], format_of(config), (*LOWER, *CANONICALIZE))
    if not clean(graph, passes)[1]:
        return graph, []
    # Optimizers may have changed the outputs, which the passes must keep as they are now.
    return settled(graph, passes, Reference(graph.to_model()), sample)


def settled(
    graph: Graph, passes: Sequence[Pass], reference: Reference, sample: Sample
) -> tuple[Graph, list[str]]:
    """Return the graph after passes that are repeated until they rewrite nothing, and notes.

    A folded constant determines further shapes, which determine further constants: arithmetic on
    sizes of a chain of layers needs as many rounds as the chain has links. The arguments are those
    of ``rewritten``.
    """
    return rewritten(graph, passes, reference, sample, _MOST_ROUNDS)


def rewritten(
    graph: Graph,
    passes: Sequence[Pass],
    reference: Reference,
    sample: Sample,
    rounds: int = 1,
) -> tuple[Graph, list[str]]:
    """Return the graph after rewriting passes, and notes.

    All passes run at once and are verified together on ``sample``. If the outputs change, the
    passes run again one by one, each verified, and the failing passes are left out.

    Args:
        graph: the float graph; not changed.
        passes: the passes, in order.
        reference: the float model.
        sample: the sample for the verification.
        rounds: as for ``clean``.

    Raises:
        ModelError: the reference does not run on the sample.
    """
    expected = reference.outputs(sample)
    cleaned, notes = clean(graph, passes, rounds)
    if not notes or unchanged(cleaned, sample, expected):
        return cleaned, notes
    # The outputs of random operators differ from run to run, and say nothing about a rewrite. The
    # second run that finds them is made only where the first comparison fails.
    expected = reference.repeatable(sample)
    if unchanged(cleaned, sample, expected):
        return cleaned, notes
    notes = list[str]()
    kept = list(passes)
    for single in passes:
        candidate, done = clean(graph, (single,))
        if not done:
            continue
        if unchanged(candidate, sample, expected):
            # The next pass starts from the accepted graph, so that passes that build on each other
            # still work.
            graph, notes = candidate, notes + done
        else:
            kept.remove(single)
            notes.append(f"{single.__name__} changed the outputs and was rolled back")
            logger.warning(
                "pass %s changed the outputs of the model; it was rolled back",
                single.__name__,
            )
    if rounds == 1:
        return graph, notes
    candidate, done = clean(graph, kept, rounds - 1)
    if done and unchanged(candidate, sample, expected):
        return candidate, notes + done
    return graph, notes


def clean(
    graph: Graph, passes: Sequence[Pass], rounds: int = 1
) -> tuple[Graph, list[str]]:
    """Return a rewritten copy, and notes.

    A failing pass is left out without a trace.

    Args:
        graph: the graph; not changed.
        passes: the passes, in order.
        rounds: greatest number of repetitions; they end after a round without a rewrite.

    Returns:
        The copy, and a note for each pass that rewrote something or failed.
    """
    # Passes rewrite in place; the caller keeps the graph for a retry.
    result, counts = graph.copy(), Counter[str]()
    extracted: Extracted = {}
    for _ in range(rounds):
        before = counts.total()
        for single in passes:
            try:
                # The other passes of LEGALIZING serve compilers of accelerators, and rewrite the
                # main graph alone.
                if single in CLEANING:
                    count = _everywhere(result, single, extracted)
                else:
                    count = single(result)
            except Exception as error:  # a defect of a pass must not fail the run
                logger.warning(
                    "pass %s failed (%s); it was left out", single.__name__, error
                )
                # A pass that raises may have left the copy half rewritten: the others start from
                # the original.
                others = [other for other in passes if other != single]
                result, notes = clean(graph, others, rounds)
                return result, [*notes, f"{single.__name__} failed: {error}"]
            if count:
                extracted.clear()
                result.drop_unused()
                result.infer()
                counts[single.__name__] += count
        if counts.total() == before:
            break
    return result, [f"{name}: {count}" for name, count in counts.items()]


def _everywhere(graph: Graph, single: Pass, extracted: Extracted) -> int:
    """Run a pass on a graph and on nested bodies.

    Args:
        extracted: as for ``in_bodies``.

    Returns:
        The number of rewritten places.
    """
    count = single(graph)
    if count:
        extracted.clear()

    def rewrite(body: Graph) -> int:
        rewrites = _everywhere(body, single, extracted)
        if rewrites:
            body.drop_unused()
            body.infer()
        return rewrites

    return count + in_bodies(graph, rewrite, extracted)


def unchanged(graph: Graph, sample: Sample, expected: dict[str, object]) -> bool:
    """Return whether a rewritten graph computes the expected values, up to rounding.

    Args:
        graph: the rewritten graph.
        sample: the sample to run it on.
        expected: outputs by name; further outputs of the graph are not compared.
    """
    try:
        outputs = run(graph.to_model(), sample)
    except QuarkError as error:
        logger.warning("the rewritten model does not run: %s", error)
        return False
    # Only outputs with known values are compared: ``expected`` may lack random outputs.
    return all(
        name in outputs and agree(value, outputs[name])
        for name, value in expected.items()
    )
