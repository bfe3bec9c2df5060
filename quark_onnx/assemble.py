"""Assemble the quantized model from the plan and the ranges of a float graph.

The stages, in order: sensitive operators stay float; scales, the rules of a target and the search
of scales; codes of the layer optimizers; biases; pairs; the form of the result. Every model that is
written or judged comes from here, so that what is judged is what is written.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from quark_onnx.common.errors import QuarkError
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig
from quark_onnx.files.half_precision import OriginalDtypes
from quark_onnx.fusions.nbits import set_accuracy_level
from quark_onnx.graph import Graph, tensor_keys
from quark_onnx.measuring.calibrate import Ranges, calibrate, missing
from quark_onnx.measuring.calibration import Calibration, Keyed
from quark_onnx.measuring.run_data import Planned, RunData
from quark_onnx.optimizers import LayerOptimizer
from quark_onnx.optimizers.problem import LayerResult
from quark_onnx.plan import Plan, Quantize
from quark_onnx.planning.plan_at_opset import plan_at_opset
from quark_onnx.refine import correct_biases, refine
from quark_onnx.report.clipping import Clipping
from quark_onnx.report.notes import ResultNote
from quark_onnx.running.function_bodies import define_functions
from quark_onnx.running.run import Reference, Sample
from quark_onnx.scales.apply_target_constraints import Limits, apply_target_constraints
from quark_onnx.scales.compute_qparams import (
    Params,
    ResolvedPlan,
    compute_bias_qparams,
    compute_qparams,
)
from quark_onnx.scales.keep_sensitive_float import keep_sensitive_ops_float
from quark_onnx.trials.clipping import measure_clipping
from quark_onnx.trials.scale_search import search
from quark_onnx.trials.trial import Trial
from quark_onnx.writing.dynamic import quantized_before, read_floats
from quark_onnx.writing.fuse import fuse
from quark_onnx.writing.insert import insert
from quark_onnx.writing.insert_subgraphs import quantize_bodies
from quark_onnx.writing.tie_transposed_weights import tie_transposed_weights
from quark_onnx.writing.unfused_sums import unfuse_sums

logger = logging.getLogger(__name__)

#: Greatest number of samples for the ranges of a rewritten graph, which bounds the runtime.
_MEASURED = 32
#: Number of samples that judge corrected biases.
_JUDGES = 4


@dataclass(frozen=True)
class Assembled:
    """A quantized graph.

    Attributes:
        graph: the graph with Q/DQ pairs, or with operators on codes.
        plan: the plan that it follows.
        quantized: whether any tensor is quantized.
        notes: notes for the report, of all stages so far.
        layers: the result of the layer optimizers for each layer.
        clipping: the clipped values of the held-out samples; None if they were not counted.
    """

    graph: Graph
    plan: Plan
    quantized: bool
    notes: list[str]
    layers: list[LayerResult]
    clipping: Clipping | None


@dataclass(frozen=True)
class Assembler:
    """Assembles quantized graphs of one float model.

    Attributes:
        reference: the float model.
        narrowing: the original types of constants.
        resume: folder of the journal of optimized layers; None for none.
    """

    reference: Reference
    narrowing: OriginalDtypes
    resume: Path | None = None

    def assemble(
        self,
        planned: Planned,
        ranges: Ranges,
        data: RunData,
        progress: bool | None,
        *,
        clipping: bool = False,
    ) -> Assembled:
        """Return the quantized graph.

        Args:
            planned: the prepared graph, which is changed, and its plans.
            ranges: the calibrated ranges.
            data: the data of the run.
            progress: as for ``quantize_static``.
            clipping: count the clipped values of the held-out samples.
        """
        graph, plan, config = planned.graph, planned.plan, planned.config
        notes = [*planned.earlier, *planned.notes]
        # Needs ranges, so that it comes after calibration and not with the plan.
        if config.safe:
            plan, kept = keep_sensitive_ops_float(graph, plan, ranges)
            notes += kept
        plan, params = compute_qparams(graph, plan, ranges)
        # Rules of the target, which later changes of scales have to keep, too.
        limits = Limits(graph, plan, params, config)
        count = apply_target_constraints(limits, params)
        notes += _moved(count, f"for the rules of the target {config.target}")
        corrected = correct_biases(
            graph, plan, params, data.first, config.optimizers, data.input_means
        )
        count = search(
            graph,
            plan,
            params,
            limits,
            [*data.first, *data.deciding] if data.first else [],
            progress,
            corrected,
            # Another function is no reference for the errors of these outputs.
            self.reference if config.keeps_function else None,
            ranges,
        )
        notes += _moved(count, "by the error of the layers behind")
        resolved = ResolvedPlan(plan, params)
        clipped = None
        if clipping:
            clipped = self._clipping(resolved, graph, config, ranges, data)
        # Scales of biases are products of the final scales; weight scales that are too small for
        # int32 biases are raised.
        plan = compute_bias_qparams(graph, plan, params)
        # After the search, as codes are chosen for final scales.
        optimizers, left_out = self._layer_optimizers(config, data)
        notes += left_out
        if optimizers:
            resolved = ResolvedPlan(plan, params)
            made = self._refined(planned, resolved, data, optimizers, progress)
        elif corrected is not graph:
            resolved = ResolvedPlan(plan, params)
            made = self._with_better_biases(planned, resolved, data, corrected)
        else:
            pairs = _with_pairs(graph, plan, params, config)
            notes += params.notes
            # Parameters and codes of a large model are large.
            del params, resolved
            made = self._completed(pairs, graph, plan, planned, data)
        return replace(made, notes=[*notes, *made.notes], clipping=clipped)

    def _layer_optimizers(
        self, config: QConfig, data: RunData
    ) -> tuple[list[LayerOptimizer], list[str]]:
        """Return the optimizers that choose codes, and why one, or ``resume``, has no effect."""
        optimizers = [
            optimizer for optimizer in config.optimizers if optimizer.stage == "layer"
        ]
        if not optimizers:
            unused = (
                "resume: no optimizer chooses codes layer by layer, nothing is kept"
            )
            return [], [unused] if self.resume else []
        if not len(data.again):
            names = ", ".join(optimizer.name for optimizer in optimizers)
            return [], [f"{names}: left out, there is no calibration data"]
        return optimizers, []

    def _completed(
        self, pairs: Graph, graph: Graph, plan: Plan, planned: Planned, data: RunData
    ) -> Assembled:
        """Return the result of a graph with pairs: bodies, functions and operators on codes.

        Args:
            pairs: the graph with pairs, which is changed.
            data: the samples that fused operators are run on.
        """
        config, notes = planned.config, list[str]()
        in_bodies = quantize_bodies(pairs, planned.body_plans, config)
        define_functions(pairs)
        if config.form == "operators":
            before = quantized_before(graph)
            pairs, fused = fuse(
                pairs, data.judges, before, runs=not self.reference.unknown_operator
            )
            set_accuracy_level(pairs, config.accuracy_level, before)
            notes += [*fused, *read_floats(pairs, before)]
        notes += [*in_bodies, *tie_transposed_weights(pairs)]
        notes += map(ResultNote, unfuse_sums(pairs, config))
        self.narrowing.store_constants(pairs)
        quantized = bool(in_bodies) or any(
            isinstance(entry, Quantize) for entry in plan.entries.values()
        )
        return Assembled(pairs, plan, quantized, notes, [], None)

    def _candidate(
        self, planned: Planned, graph: Graph, resolved: ResolvedPlan, data: RunData
    ) -> Assembled:
        """Return the result of a float graph, as one of two to choose from."""
        plan, params = resolved
        pairs = _with_pairs(graph, plan, params, planned.config)
        made = self._completed(pairs, graph, plan, planned, data)
        return replace(made, notes=[*params.notes, *made.notes])

    def _refined(
        self,
        planned: Planned,
        resolved: ResolvedPlan,
        data: RunData,
        optimizers: Sequence[LayerOptimizer],
        progress: bool | None,
    ) -> Assembled:
        """Let layer optimizers choose codes and biases.

        If the minimum output SQNR on held-out samples is below that of round to nearest with
        corrected biases, that is the result.

        Args:
            planned: the settings, and the float graph, whose biases are changed.
            resolved: its plan and scales, which are changed.
            optimizers: the layer optimizers, at least one.
            progress: as for ``quantize_static``.
        """
        graph, (plan, params) = planned.graph, resolved
        names = ", ".join(optimizer.name for optimizer in optimizers)
        cost = (
            f"{names}: cost both models one more run over {counted(len(data.again), 'sample')},"
            " layer by layer"
        )
        # The result to improve on has corrected biases, as a run without the optimizers has.
        corrected = correct_biases(graph, plan, params, data.first)
        plain = self._with_better_biases(planned, resolved, data, corrected)
        before = self._sqnr(plain, params, data.deciding)
        refinement = refine(
            graph,
            plan,
            params,
            optimizers,
            data.again,
            show=progress,
            resume=self.resume,
        )
        # Optimizers moved biases in float, and their codes follow.
        plan = compute_bias_qparams(graph, plan, params)
        made = self._candidate(planned, graph, ResolvedPlan(plan, params), data)
        after = self._sqnr(made, params, data.deciding)
        # Without held-out samples there is no evidence against the optimizers.
        if before is None or after is None or after >= before:
            notes = [cost, *refinement.notes, *made.notes]
            return replace(made, notes=notes, layers=refinement.layers)
        left_out = (
            f"{names}: left out; an output has {after:.2f} dB SQNR with it on samples"
            f" held out, and {before:.2f} dB with every weight rounded to the nearest"
        )
        return replace(plain, notes=[cost, left_out, *plain.notes])

    def _with_better_biases(
        self, planned: Planned, resolved: ResolvedPlan, data: RunData, corrected: Graph
    ) -> Assembled:
        """Return the result with corrected biases if they raise the minimum output SQNR.

        Args:
            data: the data of the run; the first few samples that are held out decide.
        """
        plain = self._candidate(planned, planned.graph, resolved, data)
        if corrected is planned.graph:
            return plain
        # Means over padded borders and through saturation are approximations, which only the
        # outputs of the model can judge.
        samples = [*data.deciding, *data.first][:_JUDGES]
        other = self._candidate(planned, corrected, resolved, data)
        before = self._sqnr(plain, resolved.params, samples)
        after = self._sqnr(other, resolved.params, samples)
        if before is None or after is None or after <= before:
            return plain
        note = (
            f"biases corrected by the mean error of rounded weights: {before:.2f} ->"
            f" {after:.2f} dB SQNR at the worst output, on {counted(len(samples), 'sample')}"
        )
        return replace(other, notes=[note, *other.notes])

    def _sqnr(
        self, made: Assembled, params: Params, samples: Sequence[Sample]
    ) -> float | None:
        """Return the SQNR that decides between results; None if it cannot be measured."""
        trial = Trial(made.graph, self.reference, params.encoded)
        return trial.sqnr_to_decide(samples)

    def _clipping(
        self,
        resolved: ResolvedPlan,
        graph: Graph,
        config: QConfig,
        ranges: Ranges,
        data: RunData,
    ) -> Clipping | None:
        """Return the clipped values of the held-out samples; None if they are not counted.

        Random samples tell nothing, and the activations of a large model take too long.
        """
        if data.random or graph.store is not None:
            return None
        samples = data.held_out

        def receive(position: int, outputs: Mapping[str, Any]) -> None:
            self.reference.remembering.remember(samples[position], outputs)

        return measure_clipping(
            graph,
            resolved,
            ranges,
            samples,
            # The measurement finds these outputs there, instead of another run.
            receive if config.keeps_function else None,
        )


def _with_pairs(graph: Graph, plan: Plan, params: Params, config: QConfig) -> Graph:
    """Return a copy of a float graph with Q/DQ pairs."""
    lower = config.form != "operators"
    return insert(graph, plan, params, form=config.pairs, lower=lower)


def _moved(count: int, why: str) -> list[str]:
    """Return a note on moved scales, except for zero."""
    if not count:
        return []
    return [f"{counted(count, 'scale')} moved {why}"]


@dataclass(frozen=True)
class RewriteTrials:
    """Makes the models that rewrites of the float graph give, to choose between rewrites.

    A rewrite preserves the float outputs, and may change rounding errors either way: factors that
    help one layer may harm another.

    Attributes:
        assembler: assembles the models.
        config: the settings of the run.
        data: the data of the run.
        statistics: receives the statistics of the first samples.
    """

    assembler: Assembler
    config: QConfig
    data: RunData
    statistics: Calibration

    def sqnr(self, graph: Graph, *, is_first: bool = False) -> float | None:
        """Return the minimum output SQNR of a quantized graph on held-out samples, in dB.

        None if no SQNR can be measured. Ranges are those of the first samples. Layer optimizers
        take long, and are left out; where they will choose the biases, no bias is corrected, and
        scales are not searched.

        Args:
            graph: a float graph; not changed.
            is_first: whether the graph is the one before any rewrite, whose outputs later steps
                need.
        """
        # Samples that an optimizer has seen would favour its rewrite.
        samples = self.data.deciding
        if not samples:
            return None
        reference = self.assembler.reference
        stages = {optimizer.stage for optimizer in self.config.optimizers}
        rewrites = [each for each in self.config.optimizers if each.stage == "float"]
        config = self.config.with_(optimizers=rewrites)
        # Corrected biases would hide the errors that a layer optimizer has to deal with.
        data = RunData(samples[0]) if "layer" in stages else self.data
        try:
            planned = plan_at_opset(
                graph.copy(), config, reference, samples[0], bodies=False
            )
            plan, ranges = planned.plan, Ranges()
            if config.measures:
                # Graphs have many tensors in common, and the run goes on with one of them.
                keyed = Keyed(self.statistics, tensor_keys(planned.graph), rich=False)
                plan, ranges, _ = calibrate(
                    planned.graph,
                    plan,
                    islice(iter(self.data.again), _MEASURED),
                    keyed=keyed,
                    receive=self.data.receive if is_first else None,
                )
            made = self.assembler.assemble(
                Planned(config, planned.graph, plan, [], [], []),
                ranges,
                data,
                progress=False,
            )
        except QuarkError as error:  # the check of the final model reports the error
            logger.debug("the effect of a rewrite cannot be measured: %s", error)
            return None
        return Trial(made.graph, reference).sqnr_to_decide(samples)


class Trials:
    """Makes models of other configurations of one float graph, with ranges that are measured once.

    A trial is the model that a run with its configuration writes. Layer optimizers take long, and
    are left out.
    """

    def __init__(
        self, assembler: Assembler, planned: Planned, ranges: Ranges, data: RunData
    ) -> None:
        """Remember the measured plan.

        Args:
            assembler: assembles the models.
            planned: a plan with statistics of its tensors (``keyed``) and of its bodies.
            ranges: the ranges of the plan.
            data: the data of the run; tensors without statistics are measured on it.
        """
        self.planned = planned
        self.reference = assembler.reference
        self._assembler = assembler
        self._ranges = ranges
        self._data = data
        # The plan at a higher opset, once a configuration needs one.
        self._raised: Planned | None = None

    def of(self, config: QConfig) -> Trial:
        """Return the model of a configuration.

        Args:
            config: the settings, which differ from those of the plan in the formats of nodes.
        """
        optimizers = [
            optimizer for optimizer in config.optimizers if optimizer.stage != "layer"
        ]
        return self._made(config, config.with_(optimizers=optimizers), self._data)

    def proxy(self, config: QConfig) -> Trial:
        """Return the model of a configuration without what takes long: its error ranks nodes.

        Scales are not searched, and biases not corrected.

        Args:
            config: as for ``of``.
        """
        form = "qdq" if config.form == "operators" else config.form
        plain = config.with_(optimizers=(), search=0, form=form)
        return self._made(plain, plain, RunData(self._data.sample))

    def _made(self, config: QConfig, built: QConfig, data: RunData) -> Trial:
        """Return the model of a configuration.

        Args:
            config: the settings for the planned configuration.
            built: the settings that the model is made by.
            data: the data for the search of scales and for biases.
        """
        measured, ranges = self.measured(config)
        graph = measured.graph.copy()  # the stages change it
        changed = replace(measured, config=built, graph=graph)
        made = self._assembler.assemble(changed, ranges, data, progress=False)
        return Trial(made.graph, self.reference)

    def measured(self, config: QConfig) -> tuple[Planned, Ranges]:
        """Return the plan of a configuration and its ranges."""
        if config == self.planned.config:
            return self.planned, self._ranges
        base = self.planned if self._raised is None else self._raised
        at_opset = plan_at_opset(base.graph, config, self.reference, self._data.sample)
        same, keyed = at_opset.graph is base.graph, base.keyed
        assert keyed is not None, "earlier statistics"
        # The statistics of bodies have no keys: their plans stay those of the base.
        body_plans = [] if same else at_opset.body_plans
        is_known = same and not missing(at_opset.graph, at_opset.plan, keyed)
        calibrated = calibrate(
            at_opset.graph,
            at_opset.plan,
            () if is_known else self._data.again,
            body_plans,
            keyed=keyed,
        )
        planned = replace(
            base,
            config=config,
            graph=at_opset.graph,
            plan=calibrated.plan,
            body_plans=base.body_plans if same else calibrated.body_plans,
            notes=[*base.notes, *at_opset.notes],
        )
        if not same:
            self._raised = planned
        return planned, calibrated.ranges
