"""Assemble the quantized model from the plan and the ranges of a float graph.

The stages, in order: sensitive operators stay float; scales, the rules of a target and the search
of scales; codes of the layer optimizers; biases; pairs; the form of the result. Every model that is
written or judged comes from here, so that what is judged is what is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quark_onnx.common.containers import names_of
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig
from quark_onnx.files.half_precision import OriginalDtypes
from quark_onnx.fusions.nbits import set_accuracy_level
from quark_onnx.graph import Graph
from quark_onnx.measuring.calibrate import Ranges, calibrate, missing
from quark_onnx.measuring.run_data import Planned, RunData
from quark_onnx.optimizers.problem import LayerResult
from quark_onnx.plan import Plan, Quantize
from quark_onnx.planning.plan_at_opset import plan_at_opset
from quark_onnx.planning.subgraph_plans import give_up_late
from quark_onnx.refine import accept_biases, correct_biases, refine
from quark_onnx.report.clipping import Clipping
from quark_onnx.running.function_bodies import define_functions
from quark_onnx.running.run import Reference
from quark_onnx.scales.apply_target_constraints import Limits, apply_target_constraints
from quark_onnx.scales.compute_qparams import (
    ResolvedPlan,
    compute_bias_qparams,
    compute_qparams,
)
from quark_onnx.scales.keep_sensitive_float import keep_sensitive_ops_float
from quark_onnx.trials.acceptance import Snapshot, min_output_sqnr
from quark_onnx.trials.clipping import measure_clipping
from quark_onnx.trials.scale_search import search
from quark_onnx.trials.trial import Trial
from quark_onnx.writing.dynamic import quantized_before, read_floats
from quark_onnx.writing.fuse import fuse
from quark_onnx.writing.insert import insert
from quark_onnx.writing.insert_subgraphs import quantize_insides
from quark_onnx.writing.tie_transposed_weights import tie_transposed_weights
from quark_onnx.writing.unfused_sums import unfuse_sums


@dataclass(frozen=True)
class Assembled:
    """A quantized graph.

    Attributes:
        graph: the graph with Q/DQ pairs, or with operators on codes.
        plan: the plan that it follows.
        quantized: whether any tensor is quantized.
        notes: notes for the report.
        sums: notes on the form of sums.
        layers: the result of the layer optimizers for each layer.
        clipping: the clipped values of the held-out samples; None if they were not counted.
    """

    graph: Graph
    plan: Plan
    quantized: bool
    notes: list[str]
    sums: list[str]
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
        notes = list(planned.notes)
        # Needs ranges, so that it comes after calibration and not with the plan.
        if config.safe:
            plan, kept = keep_sensitive_ops_float(graph, plan, ranges)
            notes += kept
        plan, params = compute_qparams(graph, plan, ranges)
        # Rules of the target, which later changes of scales have to keep, too.
        limits = Limits(graph, plan, params, config)
        count = apply_target_constraints(limits, params)
        notes += _moved(count, f"for the rules of the target {config.target}")
        # The first calibration samples, in memory.
        few = data.held.first if data.held else []
        corrected = correct_biases(
            graph,
            plan,
            params,
            few,
            config.optimizers,
            data.input_means,
        )
        count = search(
            graph,
            plan,
            params,
            limits,
            [*few, *data.deciding] if few else [],
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
        # After the search, as codes are chosen for final scales.
        graph, plan, layers = self._refine(
            graph, config, resolved, data, progress, notes
        )
        # Scales of biases are products of the final scales.
        plan = compute_bias_qparams(graph, plan, params)
        graph = accept_biases(
            graph,
            corrected,
            plan,
            params,
            self.reference,
            [*data.deciding, *few],
            notes,
        )
        notes += params.notes
        result = insert(
            graph,
            plan,
            params,
            form=config.pairs,
            lower=config.form != "operators",
        )
        # Parameters and codes of a large model are large.
        del params, resolved
        inside = quantize_insides(result, planned.insides, config)
        define_functions(result)
        if config.form == "operators":
            before = quantized_before(graph)
            result, fused = fuse(
                result,
                data.judges,
                before,
                runs=not self.reference.unknown_operator,
            )
            set_accuracy_level(result, config.accuracy_level, before)
            notes += [*fused, *read_floats(result, before)]
        notes += [*inside, *tie_transposed_weights(result)]
        sums = unfuse_sums(result, config)
        self.narrowing.store_constants(result)
        quantized = bool(inside) or any(
            isinstance(entry, Quantize) for entry in plan.entries.values()
        )
        return Assembled(result, plan, quantized, notes, sums, layers, clipped)

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

    def _refine(  # noqa: PLR0913
        self,
        graph: Graph,
        config: QConfig,
        resolved: ResolvedPlan,
        data: RunData,
        progress: bool | None,
        notes: list[str],
    ) -> tuple[Graph, Plan, list[LayerResult]]:
        """Let layer optimizers choose codes and biases.

        If the minimum output SQNR on held-out samples is below that of round to nearest, nothing
        is changed.

        Returns:
            The graph with the chosen values, its plan, and the result for each layer.
        """
        plan, params = resolved
        chosen = [
            optimizer for optimizer in config.optimizers if optimizer.stage == "layer"
        ]
        if not chosen:
            if self.resume:
                notes.append(
                    "resume: no optimizer chooses codes layer by layer, nothing is kept"
                )
            return graph, plan, []
        names = ", ".join(names_of(chosen))
        if not len(data.again):
            notes.append(f"{names}: left out, there is no calibration data")
            return graph, plan, []
        notes.append(
            f"{names}: cost both models one more run over {counted(len(data.again), 'sample')},"
            " layer by layer",
        )
        # raises weight scales that are too small for int32 biases
        plan = compute_bias_qparams(graph, plan, params)
        before = Snapshot.of(graph, plan, params)
        # Of round to nearest, the result to improve on.
        plain = min_output_sqnr(
            graph,
            plan,
            params,
            self.reference.remembering,
            data.deciding,
        )
        found = refine(
            graph,
            plan,
            params,
            chosen,
            data.again,
            show=progress,
            resume=self.resume,
        )
        # Optimizers moved biases in float, and their codes follow.
        plan = compute_bias_qparams(graph, plan, params)
        sqnr = min_output_sqnr(
            graph,
            plan,
            params,
            self.reference.remembering,
            data.deciding,
        )
        # Without held-out samples there is no evidence against the optimizers.
        if plain is None or sqnr is None or sqnr >= plain:
            notes += found.notes
            return graph, plan, found.layers
        notes.append(
            f"{names}: left out; an output has {sqnr:.2f} dB SQNR with it on samples"
            f" held out, and {plain:.2f} dB with every weight rounded to the nearest",
        )
        return *before.restore(params), []


def _moved(count: int, why: str) -> list[str]:
    """Return a note on moved scales, except for zero."""
    if not count:
        return []
    return [f"{counted(count, 'scale')} moved {why}"]


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
        optimizers = [each for each in config.optimizers if each.stage != "layer"]
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
        measured, ranges = self._measured(config)
        graph = measured.graph.copy()  # the stages change it
        changed = replace(measured, config=built, graph=graph)
        made = self._assembler.assemble(changed, ranges, data, progress=False)
        return Trial(measured, ranges, made.graph, self.reference)

    def _measured(self, config: QConfig) -> tuple[Planned, Ranges]:
        """Return the plan of a configuration and its ranges."""
        if config == self.planned.config:
            return self.planned, self._ranges
        base = self.planned if self._raised is None else self._raised
        at_opset = plan_at_opset(base.graph, config, self.reference, self._data.sample)
        same, keyed = at_opset.graph is base.graph, base.keyed
        assert keyed is not None, "earlier statistics"
        late = give_up_late(at_opset.insides, vendor=config.form == "vendor")
        # The statistics of bodies have no keys: their plans stay those of the base.
        insides = [] if same else late
        is_known = same and not missing(at_opset.graph, at_opset.plan, keyed)
        found = calibrate(
            at_opset.graph,
            at_opset.plan,
            () if is_known else self._data.again,
            insides,
            keyed=keyed,
        )
        planned = replace(
            base,
            config=config,
            graph=at_opset.graph,
            plan=found.plan,
            insides=base.insides if same else found.insides,
            notes=[*base.notes, *at_opset.notes],
        )
        if not same:
            self._raised = planned
        return planned, found.ranges
