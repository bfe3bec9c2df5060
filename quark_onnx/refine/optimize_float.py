"""Run the optimizers of the float graph.

Verify each by running the model, and keep it only if it helps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrators.onnx_runtime.session import open_session
from quark_onnx.config import QConfig, QuantizationSpec
from quark_onnx.dtypes import Integer
from quark_onnx.graph import Graph
from quark_onnx.kernels.noise import Rounding
from quark_onnx.optimizers import FloatOptimizer, Samples
from quark_onnx.patterns.conv_and_gemm import Layer
from quark_onnx.progress import Progress
from quark_onnx.refine.benefit import quantized_sqnr
from quark_onnx.report.measure import least_sqnr, measure
from quark_onnx.steps.prepare import unchanged
from quark_onnx.steps.run import Reference, Sample, run

logger = logging.getLogger(__name__)


class _Shown(Sequence[Mapping[str, Any]]):
    """Samples that are read under a progress bar."""

    def __init__(self, samples: Samples, show: bool | None, name: str) -> None:
        self._samples, self._show, self._name = samples, show, name

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        return self._samples[index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        with Progress(self._show, len(self), self._name, "sample") as bar:
            for done, sample in enumerate(self._samples, 1):
                yield sample
                bar.update(done)


@dataclass
class _Judge:
    """Accept a rewrite of the float graph unless the quantized model is further from the float one
    with it.

    Attributes:
        config: how the graphs are quantized that are held against each other.
        held_out: the samples that they are judged on.
        best: the least signal-to-noise ratio of any output before the next rewrite, in dB; None
            until it is needed.
    """

    config: QConfig
    reference: Reference
    samples: Samples
    held_out: Sequence[Sample]
    best: float | None = None

    def rejects(self, name: str, before: Graph, after: Graph) -> str:
        """Return why a rewrite by the optimizer of this name is left out, for the report.

        Empty if it is kept.
        """
        if self.best is None:
            self.best = self._sqnr(before)
        found = None if self.best is None else self._sqnr(after)
        if self.best is None or found is None:
            return ""
        if found >= self.best:
            self.best = found
            return ""
        reason = (
            f"{name}: left out; an output of the quantized model has {found:.2f} dB"
            f" SQNR with it on samples held out, and {self.best:.2f} dB without"
        )
        logger.warning("%s", reason)
        return reason

    def _sqnr(self, graph: Graph) -> float | None:
        return quantized_sqnr(
            graph,
            self.config,
            self.reference,
            self.samples,
            self.held_out,
        )


def optimize_float(  # noqa: PLR0913
    graph: Graph,
    config: QConfig,
    reference: Reference,
    sample: Sample | None,
    samples: Samples = (),
    held_out: Sequence[Sample] = (),
    *,
    show: bool | None = False,
) -> tuple[Graph, list[str]]:
    """The graph after the optimizers of its stage, in their order, and notes for the report.

    One that changes the outputs on the sample is rolled back; without a sample nothing could be
    verified. One that is for the accuracy alone is left out where the quantized model has less of
    it on samples held out.

    Args:
        sample: to verify on.
        samples: calibration data, for optimizers that need it.
        held_out: samples that no optimizer has seen; without them none is left out.
        show: whether to show a progress bar, as ``Progress`` takes it.
    """
    chosen: list[FloatOptimizer] = [
        optimizer for optimizer in config.optimizers if optimizer.stage == "float"
    ]
    notes = list[str]()
    expected: dict[str, Any] = (
        reference.repeatable(sample) if chosen and sample is not None else {}
    )
    rounding, judge = _rounding(config), _Judge(config, reference, samples, held_out)
    for optimizer in chosen:
        if sample is None:
            notes.append(
                f"{optimizer.name} was left out: the model runs on no random sample,"
                " nothing could be verified",
            )
            continue
        if optimizer.needs_data and not len(samples):
            notes.append(f"{optimizer.name} was left out: it needs calibration data")
            continue
        candidate = graph.copy()
        count = optimizer(candidate, _Shown(samples, show, optimizer.name), rounding)
        candidate.drop_unused()
        candidate.infer()
        remarks = [f"{optimizer.name}: {note}" for note in getattr(count, "notes", ())]
        if not count:
            notes += [f"{optimizer.name}: nothing to do", *remarks]
            continue
        if optimizer.exact and not unchanged(candidate, sample, expected):
            notes += [
                f"{optimizer.name} changed the outputs and was rolled back",
                *remarks,
            ]
            logger.warning(
                "%s changed the outputs of the model; it was rolled back",
                optimizer.name,
            )
            continue
        if optimizer.judged and (
            reason := judge.rejects(optimizer.name, graph, candidate)
        ):
            notes.append(reason)
            continue
        graph, done = candidate, f"{optimizer.name}: {count}"
        if not optimizer.exact:
            found = run(candidate.to_model(), sample)
            expected = {name: found[name] for name in expected}
            done += f"; {_difference(candidate, reference, sample)}"
        notes += [done, *remarks]
    return graph, notes


def give_biases(graph: Graph, config: QConfig) -> None:
    """Let every layer that can have a bias have one, of zeros, if an optimizer wants to move it."""
    if not any(
        optimizer.stage == "layer" and optimizer.moves_bias
        for optimizer in config.optimizers
    ):
        return
    for node in graph.nodes:
        layer = Layer.of(graph, node)
        if layer is not None and node.kind != "MatMul" and not node.input(2):
            layer.set_bias(graph, np.zeros(layer.outputs(graph)), "zeros")


def _rounding(config: QConfig) -> Rounding:
    """How finely the configuration rounds, as optimizers that weigh one rounding against another
    want to know it.
    """
    weight, activation = config.weight, config.activation
    return Rounding(
        weight=_steps(weight),
        per_channel=weight is None or weight.per_channel or bool(weight.block_size),
        activation=_steps(activation),
        symmetric=activation is not None and activation.symmetric,
    )


def _steps(spec: QuantizationSpec | None) -> int:
    """From one end of a range to the other; 0 for what stays float, or is rounded to a float."""
    return (
        spec.grid.qmax - spec.grid.qmin
        if spec is not None and isinstance(spec.dtype, Integer)
        else 0
    )


def _difference(graph: Graph, reference: Reference, sample: Sample) -> str:
    """How far the outputs have moved, in words."""
    errors = measure(reference.session, open_session(graph.to_model()), [sample])
    worst = least_sqnr(errors, float("inf"))
    return (
        f"it changed the float model, whose outputs have {worst:.1f} dB SQNR on the"
        " first sample"
    )
