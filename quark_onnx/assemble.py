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
from quark_onnx.common.registry import TARGETS
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig
from quark_onnx.files.half_precision import OriginalDtypes
from quark_onnx.fusions import FUSIONS, PORTABLE_FUSIONS
from quark_onnx.fusions.nbits import set_accuracy_level
from quark_onnx.graph import Graph, tensor_keys
from quark_onnx.measuring.calibrate import Ranges, calibrate, missing
from quark_onnx.measuring.calibration import Calibration, GraphCalibration
from quark_onnx.measuring.run_data import Planned, RunData
from quark_onnx.optimizers import LayerOptimizer
from quark_onnx.optimizers.problem import LayerResult
from quark_onnx.plan import Plan, Quantize
from quark_onnx.planning.plan_at_opset import plan_at_opset
from quark_onnx.refine import GOOD, correct_biases, give_biases, refine
from quark_onnx.report import ResultNote
from quark_onnx.report.clipping import Clipping
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
from quark_onnx.writing.cpu_forms import write_cpu_forms
from quark_onnx.writing.dynamic import quantized_before, read_floats
from quark_onnx.writing.fuse import fuse
from quark_onnx.writing.fusion_barriers import describe_barriers
from quark_onnx.writing.insert import insert
from quark_onnx.writing.insert_subgraphs import quantize_bodies
from quark_onnx.writing.small_products import bound_small_products
from quark_onnx.writing.tie_transposed_weights import tie_transposed_weights

logger = logging.getLogger(__name__)

#: Greatest number of samples for the ranges of a rewritten graph, which bounds the runtime.
_RANGE_SAMPLES = 32
#: Greatest number of samples that decide whether biases are corrected.
_BIAS_SAMPLES = 4


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
        resume: folder of the journal of optimized layers; None without any.
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
        notes = [*planned.notes]
        # Here and not in the plan, because the decision needs the ranges.
        if config.safe:
            plan, kept_notes = keep_sensitive_ops_float(graph, plan, ranges)
            notes += kept_notes
        plan, params = compute_qparams(graph, plan, ranges)
        # The rules of the target hold for the search of scales, too.
        limits = Limits(graph, plan, params, config)
        count = apply_target_constraints(limits, params)
        notes += _note_on_moved_scales(
            count, f"for the rules of the target {config.target}"
        )
        corrected = correct_biases(
            graph, plan, params, data.first, config.optimizers, data.input_means
        )
        count = search(
            graph,
            plan,
            params,
            limits,
            [*data.first, *data.deciding_samples] if data.first else [],
            progress,
            corrected,
            # Outputs of a graph whose function was changed cannot be compared with the float model.
            self.reference if config.keeps_function else None,
            ranges,
        )
        notes += _note_on_moved_scales(count, "by the error of the layers after them")
        resolved = ResolvedPlan(plan, params)
        clipped_values = None
        if clipping:
            clipped_values = self._clipped_values(resolved, graph, config, ranges, data)
        # Bias scales are products of the final scales. Weight scales that are too small for int32
        # biases are raised.
        plan = compute_bias_qparams(graph, plan, params)
        resolved = ResolvedPlan(plan, params)
        # After the search, since optimizers choose codes for the final scales.
        optimizers, optimizer_notes = self._layer_optimizers(config, data)
        notes += optimizer_notes
        if optimizers:
            assembled = self._optimize_layers(
                planned, resolved, data, optimizers, progress
            )
        elif corrected is not graph:
            assembled = self._with_better_biases(planned, resolved, data, corrected)
        else:
            with_pairs = _insert_pairs(graph, plan, params, config)
            notes += params.notes
            # Parameters and codes of a large model are freed before the next stage.
            del params, resolved
            assembled = self._complete(with_pairs, graph, plan, planned, data)
        return replace(
            assembled, notes=[*notes, *assembled.notes], clipping=clipped_values
        )

    def _layer_optimizers(
        self, config: QConfig, data: RunData
    ) -> tuple[list[LayerOptimizer], list[str]]:
        """Return the optimizers that choose codes, and notes on settings without an effect."""
        optimizers = [
            optimizer for optimizer in config.optimizers if optimizer.stage == "layer"
        ]
        if not optimizers:
            unused = (
                "resume: no optimizer chooses codes layer by layer, nothing is kept"
            )
            return [], [unused] if self.resume else []
        if not len(data.rereadable):
            names = ", ".join(optimizer.name for optimizer in optimizers)
            return [], [f"{names}: left out, there is no calibration data"]
        return optimizers, []

    def _complete(
        self,
        with_pairs: Graph,
        graph: Graph,
        plan: Plan,
        planned: Planned,
        data: RunData,
    ) -> Assembled:
        """Quantize bodies, define functions, and fuse pairs to operators on codes if configured.

        Args:
            with_pairs: the graph with pairs, which is changed.
            graph: the float graph.
            data: the data of the run; fused operators are run on its held-out samples.
        """
        config, notes = planned.config, list[str]()
        body_notes = quantize_bodies(with_pairs, planned.body_plans, config)
        define_functions(with_pairs)
        if config.form == "operators":
            before = quantized_before(graph)
            with_pairs, fusion_notes = fuse(
                with_pairs,
                data.test_samples,
                before,
                runs=not self.reference.unknown_operator,
                fusions=PORTABLE_FUSIONS if config.portable else FUSIONS,
            )
            set_accuracy_level(with_pairs, config.accuracy_level, before)
            notes += [*fusion_notes, *read_floats(with_pairs, before)]
        notes += [*body_notes, *tie_transposed_weights(with_pairs)]
        notes += map(ResultNote, write_cpu_forms(with_pairs, config))
        takes = TARGETS[config.target].takes if config.target else None
        if takes is not None and not takes.small_products:
            notes += map(ResultNote, bound_small_products(with_pairs))
        if not config.target or TARGETS[config.target].keeps_barriers:
            notes += map(ResultNote, describe_barriers(with_pairs))
        self.narrowing.store_constants(with_pairs)
        quantized = bool(body_notes) or any(
            isinstance(entry, Quantize) for entry in plan.entries.values()
        )
        return Assembled(with_pairs, plan, quantized, notes, [], None)

    def _candidate(
        self, planned: Planned, graph: Graph, resolved: ResolvedPlan, data: RunData
    ) -> Assembled:
        """Return the quantized graph of a float graph, as one of two to choose from."""
        plan, params = resolved
        with_pairs = _insert_pairs(graph, plan, params, planned.config)
        candidate = self._complete(with_pairs, graph, plan, planned, data)
        return replace(candidate, notes=[*params.notes, *candidate.notes])

    def _optimize_layers(
        self,
        planned: Planned,
        resolved: ResolvedPlan,
        data: RunData,
        optimizers: Sequence[LayerOptimizer],
        progress: bool | None,
    ) -> Assembled:
        """Return the result of the layer optimizers, or that of round to nearest if it is better.

        The result with the higher minimum output SQNR on held-out samples is returned. Round to
        nearest has corrected biases, as in a run without the optimizers.

        Args:
            planned: the settings, and the float graph, whose biases are changed.
            resolved: its plan and scales, which are changed.
            optimizers: the layer optimizers, at least one.
            progress: as for ``quantize_static``.
        """
        graph, (plan, params) = planned.graph, resolved
        names = ", ".join(optimizer.name for optimizer in optimizers)
        samples = counted(len(data.rereadable), "sample")
        cost = f"{names}: cost both models one more run over {samples}, layer by layer"
        corrected = correct_biases(graph, plan, params, data.first)
        nearest = self._with_better_biases(planned, resolved, data, corrected)
        before = self._sqnr(nearest, params, data.deciding_samples)
        least_gain = max(getattr(each, "least_gain", 0.0) for each in optimizers)
        # Nobody asked for optimizers with a least gain, and they take a run of both models.
        if least_gain and before is not None and before >= GOOD:
            needless = f"{names}: left out: without it every output has {GOOD:g} dB SQNR or more"
            return replace(nearest, notes=[needless, *nearest.notes])
        refinement = refine(
            graph,
            plan,
            params,
            optimizers,
            data.rereadable,
            show=progress,
            resume=self.resume,
        )
        # The optimizers have changed the float biases, so their scales are computed again.
        plan = compute_bias_qparams(graph, plan, params)
        optimized = self._candidate(planned, graph, ResolvedPlan(plan, params), data)
        after = self._sqnr(optimized, params, data.deciding_samples)
        # Without held-out samples there is no evidence against the optimizers.
        if before is None or after is None or after >= before + least_gain:
            notes = [cost, *refinement.notes, *optimized.notes]
            return replace(optimized, notes=notes, layers=refinement.layers)
        left_out = (
            f"{names}: left out; the worst output has {after:.2f} dB SQNR with it on held-out"
            f" samples, and {before:.2f} dB with weights rounded to nearest"
        )
        if after >= before:
            left_out += ", too small a gain"
        return replace(nearest, notes=[cost, left_out, *nearest.notes])

    def _with_better_biases(
        self, planned: Planned, resolved: ResolvedPlan, data: RunData, corrected: Graph
    ) -> Assembled:
        """Return the result with corrected biases if they raise the minimum output SQNR.

        A few held-out samples decide, or calibration samples if there are none.
        """
        uncorrected = self._candidate(planned, planned.graph, resolved, data)
        if corrected is planned.graph:
            return uncorrected
        # The corrections are approximations at padded borders and under saturation, so the outputs
        # of the model decide.
        samples = [*data.deciding_samples, *data.first][:_BIAS_SAMPLES]
        candidate = self._candidate(planned, corrected, resolved, data)
        before = self._sqnr(uncorrected, resolved.params, samples)
        after = self._sqnr(candidate, resolved.params, samples)
        if before is None or after is None or after <= before:
            return uncorrected
        note = (
            f"biases corrected by the mean error of rounded weights: {before:.2f} ->"
            f" {after:.2f} dB SQNR at the worst output, on {counted(len(samples), 'sample')}"
        )
        return replace(candidate, notes=[note, *candidate.notes])

    def _sqnr(
        self, assembled: Assembled, params: Params, samples: Sequence[Sample]
    ) -> float | None:
        """Return the SQNR that decides between results; None if it cannot be measured."""
        trial = Trial(assembled.graph, self.reference, params.encoded)
        return trial.sqnr_to_decide(samples)

    def _clipped_values(
        self,
        resolved: ResolvedPlan,
        graph: Graph,
        config: QConfig,
        ranges: Ranges,
        data: RunData,
    ) -> Clipping | None:
        """Count the clipped values of the held-out samples.

        None for random samples, whose values say nothing about real data, and for large models,
        which would take too long.
        """
        if data.random or graph.store is not None:
            return None
        samples = data.held_out

        def remember_outputs(position: int, outputs: Mapping[str, Any]) -> None:
            self.reference.remembering.remember(samples[position], outputs)

        return measure_clipping(
            graph,
            resolved,
            ranges,
            samples,
            # The verdict finds the outputs in the reference, which saves a run of the float model.
            remember_outputs if config.keeps_function else None,
        )


def _insert_pairs(graph: Graph, plan: Plan, params: Params, config: QConfig) -> Graph:
    """Return a copy of a float graph with Q/DQ pairs."""
    lower = config.form != "operators"
    return insert(graph, plan, params, form=config.pairs, lower=lower)


def _note_on_moved_scales(count: int, why: str) -> list[str]:
    """Return a note on the number of moved scales; no note for zero."""
    if not count:
        return []
    return [f"{counted(count, 'scale')} moved {why}"]


@dataclass(frozen=True)
class RewriteTrials:
    """Quantizes rewritten float graphs, to choose between rewrites by their output error.

    A rewrite, such as equalization, preserves the float outputs, and may increase or decrease
    rounding errors: factors that help one layer may harm another.

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
        are left out, as they take long. If the run has any, biases are not corrected and scales
        are not searched either.

        Args:
            graph: a float graph; not changed.
            is_first: whether this is the graph before any rewrite; its outputs are kept for later
                steps.
        """
        # Held out, since an optimizer fits its rewrite to the samples that it has seen.
        samples = self.data.deciding_samples
        if not samples:
            return None
        reference = self.assembler.reference
        stages = {optimizer.stage for optimizer in self.config.optimizers}
        rewrites = [
            optimizer
            for optimizer in self.config.optimizers
            if optimizer.stage == "float"
        ]
        config = self.config.with_(optimizers=rewrites)
        # Layer optimizers start from uncorrected biases. Without calibration samples, no bias is
        # corrected and no scale is searched.
        data = RunData(samples[0]) if "layer" in stages else self.data
        graph = graph.copy()
        # As the run does: tensors of one computation have one range.
        give_biases(graph, self.config)
        try:
            planned = plan_at_opset(graph, config, reference, samples[0], bodies=False)
            plan, ranges = planned.plan, Ranges()
            if config.measures:
                # Rewritten graphs have most tensors in common with each other and with the result:
                # each range is measured once.
                keyed = GraphCalibration(
                    self.statistics, tensor_keys(planned.graph), rich=False
                )
                plan, ranges, _ = calibrate(
                    planned.graph,
                    plan,
                    islice(iter(self.data.rereadable), _RANGE_SAMPLES),
                    keyed=keyed,
                    receive=self.data.receive if is_first else None,
                )
            assembled = self.assembler.assemble(
                Planned(config, planned.graph, plan, [], []),
                ranges,
                data,
                progress=False,
            )
        # The check of the final model reports the error to the user.
        except QuarkError as error:
            logger.debug("the effect of a rewrite cannot be measured: %s", error)
            return None
        return Trial(assembled.graph, reference).sqnr_to_decide(samples)


class ConfigTrials:
    """Quantizes one float graph with several configurations, and measures each range once.

    A trial is the model that a run with the configuration would write, except that layer optimizers
    are left out, as they take long.
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
        # The plan at a higher opset, after the first configuration that needs one.
        self._planned_higher: Planned | None = None

    def of(self, config: QConfig) -> Trial:
        """Return the model of a configuration.

        Args:
            config: the settings, which differ from those of the plan in the formats of nodes.
        """
        optimizers = [
            optimizer for optimizer in config.optimizers if optimizer.stage != "layer"
        ]
        return self._trial(config, config.with_(optimizers=optimizers), self._data)

    def proxy(self, config: QConfig) -> Trial:
        """Return a model of a configuration that is made faster; its error ranks nodes.

        Scales are not searched, biases are not corrected, and pairs are not fused.

        Args:
            config: as for ``of``.
        """
        form = "qdq" if config.form == "operators" else config.form
        plain = config.with_(optimizers=(), search=0, form=form)
        return self._trial(plain, plain, RunData(self._data.sample))

    def _trial(self, config: QConfig, assembly: QConfig, data: RunData) -> Trial:
        """Return the model of a configuration.

        Args:
            assembly: the settings of the later stages.
        """
        planned, ranges = self.measured(config)
        graph = planned.graph.copy()  # the stages change it
        planned = replace(planned, config=assembly, graph=graph)
        assembled = self._assembler.assemble(planned, ranges, data, progress=False)
        return Trial(assembled.graph, self.reference)

    def measured(self, config: QConfig) -> tuple[Planned, Ranges]:
        """Return the plan of a configuration and its ranges."""
        if config == self.planned.config:
            return self.planned, self._ranges
        base = self._planned_higher or self.planned
        at_opset = plan_at_opset(base.graph, config, self.reference, self._data.sample)
        is_same_opset, keyed = at_opset.graph is base.graph, base.keyed
        assert keyed is not None, "``_prepare`` adds statistics for mixed precision"
        # Statistics of bodies have no keys, so bodies keep their plans and ranges.
        body_plans = [] if is_same_opset else at_opset.body_plans
        is_known = is_same_opset and not missing(at_opset.graph, at_opset.plan, keyed)
        calibrated = calibrate(
            at_opset.graph,
            at_opset.plan,
            () if is_known else self._data.rereadable,
            body_plans,
            keyed=keyed,
        )
        planned = replace(
            base,
            config=config,
            graph=at_opset.graph,
            plan=calibrated.plan,
            body_plans=base.body_plans if is_same_opset else calibrated.body_plans,
            notes=[*base.notes, *at_opset.notes],
        )
        if not is_same_opset:
            self._planned_higher = planned
        return planned, calibrated.ranges
