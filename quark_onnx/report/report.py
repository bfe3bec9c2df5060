"""The report of a run, as data and as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from onnx import ModelProto

from calibrators.onnx_runtime.tensors import model_bytes
from quark_onnx.common.reported import SCHEMA, plain
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig
from quark_onnx.optimizers.problem import LayerResult
from quark_onnx.page.blocks import (
    Block,
    Facts,
    Notes,
    Reasons,
    Text,
    TitledTable,
    Warnings,
)
from quark_onnx.page.reported import Reported
from quark_onnx.patterns.slow_depthwise import describe_slow_depthwise
from quark_onnx.plan import Keep, Plan
from quark_onnx.plan.blocks import describe_blocks
from quark_onnx.report.blocks import (
    gallery_blocks,
    outputs_block,
    score_facts,
    size_fact,
    verdict_block,
)
from quark_onnx.report.clipping import Clipping
from quark_onnx.report.figures import decibels, size_change
from quark_onnx.report.measure import OutputError, least_sqnr
from quark_onnx.report.verdict.exhibits import Exhibits
from quark_onnx.report.verdict.labels import Score, score_lines
from quark_onnx.report.verdict.verdict import Verdict


@dataclass(frozen=True, repr=False)
class Report(Reported):
    """The report of a run.

    Attributes:
        config: the effective settings as text.
        samples: number of calibration samples.
        held_out: number of samples held out for measuring; 0 if measured on calibration
            samples.
        bytes_before, bytes_after: size of the serialized models.
        operators: number of quantized nodes and of all nodes, by operator type.
        kept_nodes: reason why a node stayed float, by name.
        kept_tensors: reason why a quantizable tensor stayed float, by name.
        notes: rewrites, rolled-back passes, raised scales, findings of the guard.
        outputs: the error of each output.
        layers: the optimizers' result for each layer.
        verdict: the quality in the terms of the task; None without a measurement, or if it was
            left out.
        kept_types: operator types of ``kept_nodes``, by node.
        warnings: signs of wrong preprocessing of the data.
        clipping: values of held-out samples outside of the calibrated ranges; None if not measured.
        exhibits: the samples that differ most, for a page; None without a measurement.
        scores: metrics of both models on held-out samples whose labels came with the data.
        labelled: number of these samples.
    """

    config: str
    samples: int
    held_out: int
    bytes_before: int
    bytes_after: int
    operators: dict[str, tuple[int, int]]
    kept_nodes: dict[str, str]
    kept_tensors: dict[str, str]
    notes: list[str] = field(default_factory=list)
    outputs: list[OutputError] = field(default_factory=list)
    layers: list[LayerResult] = field(default_factory=list)
    verdict: Verdict | None = None
    kept_types: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    clipping: Clipping | None = None
    exhibits: Exhibits | None = field(default=None, compare=False, repr=False)
    scores: list[Score] = field(default_factory=list)
    labelled: int = 0

    @property
    def quantized(self) -> int:
        """Return the number of quantized nodes."""
        return sum(done for done, _ in self.operators.values())

    @property
    def worst_sqnr(self) -> float:
        """Return the minimum SQNR over float outputs, in dB, or infinity."""
        return least_sqnr(self.outputs, math.inf)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values with a stable schema.

        Infinities become the strings "inf" and "-inf", NaN None.
        """
        fields = asdict(replace(self, exhibits=None))
        del fields["exhibits"]
        # JSON has no infinities and no NaN; plain() replaces them.
        return {
            "schema": SCHEMA,
            "quantized_nodes": self.quantized,
            **plain(fields),
        }

    def blocks(self) -> list[Block]:
        """Return the report as blocks."""
        total = sum(count for _, count in self.operators.values())
        calibrated = ""
        if self.samples:
            calibrated = f", calibrated on {counted(self.samples, 'sample')}"
        quantized = [f"{self.quantized} of {counted(total, 'node')}{calibrated}"]
        # A successful run that changed nothing must not pass unnoticed.
        if not self.quantized:
            quantized.append("nothing in this model could be quantized")
        size = [size_change(self.bytes_before, self.bytes_after)]
        facts = [size_fact(self.bytes_before, self.bytes_after)]
        facts.append(("Quantized", f"{self.quantized} of {total}", "nodes"))
        if self.outputs:
            worst = f"{decibels(self.worst_sqnr)} dB"
            facts.append(("SQNR", worst, "of the worst output"))
        samples = f"{self.samples} + {self.held_out}"
        facts.append(("Samples", samples, "for calibration, and held out"))
        facts += score_facts(self.scores)
        lines = {
            "size": size,
            "quantized": quantized,
            "labels": score_lines(
                self.scores, self.labelled, "labelled held-out sample"
            ),
        }
        # Outputs are measured without a verdict only where nobody asked for one.
        missing = "left out" if self.outputs else "no sample was run"
        blocks: list[Block] = [
            verdict_block(self.verdict, missing),
            Facts(facts, lines),
            outputs_block(self.outputs, self._measured_on()),
            *gallery_blocks(self.exhibits, self.verdict),
        ]
        rows = [
            (kind, str(done), str(count))
            for kind, (done, count) in self.operators.items()
        ]
        clipped = self.clipping.lines() if self.clipping is not None else []
        return [
            *blocks,
            Warnings(lines=self.warnings),
            Notes("Clipped values of held-out samples", clipped, "clipped"),
            Reasons(
                "Float nodes",
                self.kept_nodes,
                "node",
                "nodes",
                "float",
                self.kept_types,
            ),
            Reasons("Float tensors", self.kept_tensors, "tensor", "tensors", "kept"),
            Notes("Notes", self.notes, "notes"),
            TitledTable("Operators", ("operator", "quantized", "nodes"), rows),
            Text("Settings", self.config),
        ]

    def _measured_on(self) -> str:
        """Return the samples of the measurement in words."""
        # Held-out samples come first: only they tell about data that the ranges have not seen.
        if self.held_out:
            return counted(self.held_out, "held-out sample")
        if self.samples:
            return "calibration samples (none is held out)"
        return (
            "one random sample, as there is no data: it tells that the model runs, and"
            " little more"
        )


class ResultNote(str):
    """A note that holds only for a quantized result, such as one on a rewrite of the float graph.

    It does not hold where the float model itself is the result.
    """


def of_float_model(notes: Iterable[str]) -> list[str]:
    """Return the notes that hold where the float model itself is the result.

    >>> of_float_model(["no data was read", ResultNote("fold_constants: 2")])
    ['no data was read']
    """
    return [note for note in notes if not isinstance(note, ResultNote)]


def make_report(  # noqa: PLR0913
    config: QConfig,
    plans: Sequence[Plan],
    before: ModelProto,
    after: ModelProto,
    notes: Sequence[str],
    *,
    samples: int = 0,
    held_out: int = 0,
    outputs: Sequence[OutputError] = (),
    layers: Sequence[LayerResult] = (),
) -> Report:
    """Return the report of a run, without a verdict.

    Args:
        config: the settings.
        plans: the plans of the graph and of its bodies.
        before: the float model.
        after: the result.
        notes: notes of all stages, in order.
        samples: number of calibration samples.
        held_out: number of samples held out for measuring.
        outputs: errors of the outputs; none if nothing was measured.
        layers: results of the layer optimizers.
    """
    operators, kept_nodes, kept_tensors = summarize(*plans)
    lines = [*describe_blocks(plans), *map(str, notes)]
    # The kernel concerns onnxruntime on the CPU, not a processor that is targeted.
    if not config.npu and (slow := describe_slow_depthwise(after)):
        lines.append(slow)
    bytes_before, bytes_after = model_bytes(before), model_bytes(after)
    if bytes_after > bytes_before and any(count for count, _ in operators.values()):
        lines.append(
            "the result is larger than the float model: weights stay float, or are"
            " small, or are stored more than once",
        )
    return Report(
        config=str(config),
        samples=samples,
        held_out=held_out if outputs else 0,
        bytes_before=bytes_before,
        bytes_after=bytes_after,
        operators=operators,
        kept_nodes=kept_nodes,
        kept_tensors=kept_tensors,
        notes=lines,
        outputs=[*outputs],
        layers=[*layers],
        kept_types={
            node.name: node.kind
            for plan in plans
            for node in plan.graph.nodes
            if node.name in plan.kept
        },
    )


def summarize(
    *plans: Plan,
) -> tuple[dict[str, tuple[int, int]], dict[str, str], dict[str, str]]:
    """Return operators, kept nodes and kept tensors of plans, for a report.

    A node with bodies is not counted; the nodes of the bodies are.

    Args:
        plans: the plans of a graph and of its bodies.
    """
    operators = dict[str, tuple[int, int]]()
    kept_nodes = dict[str, str]()
    kept_tensors = dict[str, str]()
    for plan in plans:
        # If, Loop and Scan run in float themselves; their bodies have plans of their own.
        outer = set[str]()
        if len(plans) > 1:
            outer = {node.name for node in plan.graph.nodes if node.has_subgraph}
        for node in plan.graph.nodes:
            if node.name not in outer:
                done, count = operators.get(node.kind, (0, 0))
                # A bool counts as 0 or 1.
                quantized = plan.computes_on_codes(node)
                operators[node.kind] = (done + quantized, count + 1)
        kept_nodes |= {
            key: value for key, value in plan.kept.items() if key not in outer
        }
        # A fused tensor is left out: it does not exist as the quantized model runs.
        kept_tensors |= {
            str(use): entry.reason
            for use, entry in plan.entries.items()
            if isinstance(entry, Keep) and not entry.reason.startswith("fused into")
        }
    # Sorted by name: reports of two runs can be compared line by line.
    return dict(sorted(operators.items())), kept_nodes, kept_tensors
