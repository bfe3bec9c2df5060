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

#: Maximum number of tensors in the ranking; as many have histograms.
TOP = 12


@dataclass(frozen=True, repr=False)
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

    def blocks(self, top: int = TOP) -> list[Block]:
        """Return the verdict, the outputs and the tensors that add noise as blocks.

        Args:
            top: maximum number of tensors in the ranking.
        """
        formats = Counter(tensor.format for tensor in self.tensors if tensor.format)
        facts = [
            ("SQNR", f"{decibels(self.sqnr)} dB", "of the worst output"),
            size_fact(self.bytes_before, self.bytes_after),
            ("Samples", f"{self.samples:,}", "run by both models"),
            (
                "Tensors compared",
                f"{len(self.tensors):,}",
                tally(formats.most_common(2)) or "none quantized",
            ),
            ("Constants", f"{len(self.weights):,}", "weights and biases"),
        ]
        lines = {
            "size": [size_change(self.bytes_before, self.bytes_after)],
            "compared": self._compared(),
        }
        judgement = verdict_block(self.verdict)
        if self.ranking:
            noisiest = self.ranking[0]
            name = f"{noisiest.op_type} {noisiest.node or noisiest.name}"
            judgement = replace(judgement, details=(f"{name} adds most of the noise",))
        return [
            judgement,
            Facts(facts, lines),
            Warnings(lines=self.warnings),
            outputs_block(
                self.outputs, counted(self.samples, "sample"), self._in_own_units()
            ),
            along_the_graph(self.tensors, self.ranking, self.sqnr),
            noise_ranking(self.ranking[:top], self.weights),
            Reasons(
                "Not compared",
                {tensor.name: tensor.reason for tensor in self.unmatched},
                "tensor or constant",
                "tensors and constants",
                "unmatched",
            ),
            READING,
        ]

    def _compared(self) -> list[str]:
        """Return the numbers of compared tensors and constants in words."""
        matches = Counter(tensor.matched_by for tensor in self.tensors)
        how = ", ".join(f"{number} by {name}" for name, number in matches.items())
        tensors = (
            f"{counted(len(self.tensors), 'tensor')} ({how})" if how else "no tensor"
        )
        roles = Counter(weight.role for weight in self.weights)
        # For example "12 quantized weights, 12 quantized biases".
        constants = [
            counted(number, f"quantized {role}") for role, number in roles.items()
        ]
        lines = [", ".join([tensors, *constants])]
        # Booleans count as 0 and 1.
        if rescaled := sum(tensor.rescaled for tensor in self.tensors):
            have = counted(rescaled, "of them has", "of them have")
            lines.append(
                f"{have} channels on other scales, as equalization leaves them; these"
                " were taken out"
            )
        return lines

    def _in_own_units(self) -> dict[str, dict[str, str]]:
        """Return the step and the float values of each output, in its own unit.

        The range of values tells whether a step is coarse: 4 pixels are much for a box of 20.
        """
        steps = {name: f"{step:.3g}" for name, step in self.steps.items()}
        values = {
            tensor.name: f"{tensor.lo:.4g} to {tensor.hi:.4g}"
            for tensor in self.tensors
        }
        # An output without a uniform grid has no step.
        return {"step": steps, "float values": values}

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values; numbers may be infinite."""
        return {
            "worst_sqnr": self.sqnr,
            # asdict copies fields alone; properties are added by name.
            **asdict(self),
            "ranking": [value.name for value in self.ranking],
        }
