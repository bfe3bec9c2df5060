"""Result of an analysis."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quark_onnx.analysis.findings import TensorError, Unmatched, WeightError
from quark_onnx.analysis.page.along import along_the_graph
from quark_onnx.analysis.page.ranking import READING, noise_ranking
from quark_onnx.common.wording import counted, tally
from quark_onnx.page.blocks import Block, Facts, Reasons, Warnings
from quark_onnx.page.reported import Reported
from quark_onnx.report import decibels, size_change
from quark_onnx.report.blocks import outputs_block, size_fact, verdict_block
from quark_onnx.report.measure import OutputError, least_sqnr
from quark_onnx.report.verdict import Verdict


@dataclass(frozen=True)
class Analysis(Reported):
    """Accuracy losses of a quantized model, and their causes.

    Attributes:
        samples: number of samples.
        bytes_before: size of the float model.
        bytes_after: size of the quantized model.
        outputs: error of each output.
        tensors: error of each compared tensor, in the order of execution.
        weights: error of each quantized constant.
        unmatched: tensors and constants without a comparison.
        steps: step of each output with values on a grid, in the output's own unit.
        verdict: quality in the terms of the task, as ``compare`` gives it.
        warnings: signs of wrong preprocessing of the data.
    """

    samples: int
    bytes_before: int
    bytes_after: int
    outputs: list[OutputError]
    tensors: list[TensorError]
    weights: list[WeightError]
    unmatched: list[Unmatched]
    steps: dict[str, float] = field(default_factory=dict)
    verdict: Verdict | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def sqnr(self) -> float:
        """Return the least SQNR of a float output in dB; infinite if there is none."""
        return least_sqnr(self.outputs, math.inf)

    @property
    def ranking(self) -> list[TensorError]:
        """Return tensors with added noise, noisiest first."""
        # Equal noise keeps the order of execution (sorted is stable).
        return sorted((t for t in self.tensors if t.added > 0), key=lambda t: -t.added)

    def blocks(self) -> list[Block]:
        """Return the verdict, the outputs and the tensors that add noise as blocks."""
        formats = Counter(each.format for each in self.tensors if each.format)
        kinds = tally(formats.most_common(2)) or "none quantized"
        facts = [
            ("SQNR", f"{decibels(self.sqnr)} dB", "of the worst output"),
            size_fact(self.bytes_before, self.bytes_after),
            ("Samples", f"{self.samples:,}", "run by both models"),
            ("Tensors compared", f"{len(self.tensors):,}", kinds),
            ("Constants", f"{len(self.weights):,}", "weights and biases"),
        ]
        size = [size_change(self.bytes_before, self.bytes_after)]
        judged = verdict_block(self.verdict)
        if self.ranking:
            first = self.ranking[0]
            noisiest = f"{first.op_type} {first.node or first.name}"
            judged = replace(judged, details=(f"{noisiest} adds most of the noise",))
        unmatched = {each.name: each.reason for each in self.unmatched}
        return [
            judged,
            Facts(facts, {"size": size}),
            Warnings(lines=self.warnings),
            outputs_block(self.outputs, counted(self.samples, "sample")),
            along_the_graph(self.tensors, self.ranking, self.sqnr),
            noise_ranking(self.ranking, self.weights),
            Reasons(
                "Not compared",
                unmatched,
                "tensor or constant",
                "tensors and constants",
            ),
            READING,
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values; numbers may be infinite."""
        return {
            "worst_sqnr": self.sqnr,
            # asdict copies fields alone; properties are added by name.
            **asdict(self),
            "ranking": [value.name for value in self.ranking],
        }
