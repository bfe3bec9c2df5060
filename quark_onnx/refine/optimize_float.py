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
from quark_onnx.config.text import format_call
from quark_onnx.dtypes import Integer
from quark_onnx.graph import Graph
from quark_onnx.kernels.noise import Rounding
from quark_onnx.optimizers import Adaptive, FloatOptimizer, Samples
from quark_onnx.patterns.conv_and_gemm import Layer
from quark_onnx.progress import Progress
from quark_onnx.refine.benefit import quantized_sqnr
from quark_onnx.report.measure import least_sqnr, measure
from quark_onnx.steps.prepare import unchanged
from quark_onnx.steps.run import Reference, Sample, run

logger = logging.getLogger(__name__)


#: Decibels that a rewrite has to bring where it doubles the estimated runtime.
_PRICE = 5.0


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

    def rejects(
        self,
        name: str,
        before: Graph,
        after: Graph,
        slowdown: float = 0.0,
    ) -> str:
        """Return why a rewrite by the optimizer of this name is left out, for the report.

        Empty if it is kept.

        Args:
            slowdown: by how much it makes the quantized model slower, which it has to be worth.
        """
        if self.best is None:
            self.best = self._sqnr(before)
        found = None if self.best is None else self._sqnr(after)
        if self.best is None or found is None:
            return ""
        if found >= self.best + _PRICE * slowdown:
            self.best = found
            return ""
        reason = (
            f"{name}: left out; an output of the quantized model has {found:.2f} dB"
            f" SQNR with it on samples held out, and {self.best:.2f} dB without"
        )
        if found >= self.best:
            reason += f", too little for {slowdown:.0%} more runtime (estimated)"
            logger.info("%s", reason)
            return reason
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
    rewriter = _Rewriter(graph, config, reference, sample, samples, held_out, show=show)
    for optimizer in config.optimizers:
        if optimizer.stage == "float":
            rewriter.apply(optimizer)
    return rewriter.graph, rewriter.notes


class _Rewriter:
    """A float graph that optimizers rewrite one after the other.

    Attributes:
        graph: with the rewrites that were accepted.
        notes: for the report.
    """

    def __init__(  # noqa: PLR0913
        self,
        graph: Graph,
        config: QConfig,
        reference: Reference,
        sample: Sample | None,
        samples: Samples,
        held_out: Sequence[Sample],
        *,
        show: bool | None,
    ) -> None:
        self.graph = graph
        self.notes = list[str]()
        self._reference, self._sample, self._samples = reference, sample, samples
        self._rounding = _rounding(config)
        self._judge = _Judge(config, reference, samples, held_out)
        self._show = show
        self._outputs: dict[str, Any] = {}

    def apply(self, optimizer: FloatOptimizer) -> None:
        """Rewrite the graph by an optimizer, by the first of its variants that is accepted."""
        name = optimizer.name
        if self._sample is None:
            self.notes.append(
                f"{name} was left out: the model runs on no random sample, nothing"
                " could be verified",
            )
            return
        if optimizer.needs_data and not len(self._samples):
            self.notes.append(f"{name} was left out: it needs calibration data")
            return
        variants = [(optimizer, 0.0)]
        if isinstance(optimizer, Adaptive):
            variants = optimizer.variants(self.graph)
        rewritten = False
        for variant, slowdown in variants:
            label = format_call(variant) if len(variants) > 1 else name
            candidate = self.graph.copy()
            shown = _Shown(self._samples, self._show, name)
            count = variant(candidate, shown, self._rounding)
            candidate.drop_unused()
            candidate.infer()
            remarks = [f"{name}: {note}" for note in getattr(count, "notes", ())]
            if not count:
                if variant is variants[-1][0] and not rewritten:
                    self.notes += [f"{name}: nothing to do", *remarks]
                continue
            rewritten = True
            if reason := self._refused(variant, label, candidate, slowdown):
                self.notes += [reason, *remarks]
                continue
            self._accept(variant, label, candidate, count)
            if slowdown:
                remarks.append(
                    f"{label}: about {slowdown:.0%} more runtime (estimated)"
                )
            self.notes += remarks
            return

    def _refused(
        self,
        optimizer: FloatOptimizer,
        label: str,
        candidate: Graph,
        slowdown: float,
    ) -> str:
        """Return why a rewritten graph is not taken; empty if it is."""
        assert self._sample is not None
        if not self._outputs:
            self._outputs = self._reference.repeatable(self._sample)
        if optimizer.exact and not unchanged(candidate, self._sample, self._outputs):
            logger.warning(
                "%s changed the outputs of the model; it was rolled back",
                label,
            )
            return f"{label} changed the outputs and was rolled back"
        if not optimizer.judged:
            return ""
        return self._judge.rejects(label, self.graph, candidate, slowdown)

    def _accept(
        self,
        optimizer: FloatOptimizer,
        label: str,
        candidate: Graph,
        count: int,
    ) -> None:
        """Go on from a rewritten graph."""
        assert self._sample is not None
        note = f"{label}: {count}"
        self.graph = candidate
        if not optimizer.exact:
            found = run(candidate.to_model(), self._sample)
            self._outputs = {name: found[name] for name in self._outputs}
            note += f"; {_difference(candidate, self._reference, self._sample)}"
        self.notes.append(note)


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
