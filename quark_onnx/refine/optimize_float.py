"""Optimizers of the float graph, verified by running the model.

A rewrite is kept only if it does not increase the error of the quantized model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from calibrators.onnx_runtime.session import open_session
from quark_onnx.common.progress import Progress
from quark_onnx.common.registry import TARGETS
from quark_onnx.common.wording import prefixed
from quark_onnx.config import QConfig, QuantizationSpec
from quark_onnx.config.text import format_call
from quark_onnx.dtypes import Integer
from quark_onnx.graph import Graph
from quark_onnx.kernels.noise import Rounding
from quark_onnx.optimizers import Adaptive, FloatOptimizer, Samples
from quark_onnx.patterns.conv_and_gemm import Layer
from quark_onnx.planning.prepare import unchanged
from quark_onnx.report.measure import least_sqnr, measure
from quark_onnx.running.run import Reference, Sample, run

logger = logging.getLogger(__name__)


#: Minimum gain in dB of a rewrite that doubles the estimated runtime.
_PRICE = 5.0
#: An optimizer that nobody asked for is not tried where every output has this SQNR, in dB.
GOOD = 40.0


class SqnrOf(Protocol):
    """Returns the minimum output SQNR of a graph after quantization; see ``RewriteTrials``."""

    def __call__(self, graph: Graph, *, is_first: bool = False) -> float | None:
        """Return the SQNR in dB; None if it cannot be measured."""


class _Shown(Sequence[Mapping[str, Any]]):
    """Samples with a progress bar."""

    def __init__(self, samples: Samples, show: bool | None, name: str) -> None:
        """Wrap samples; ``show`` is that of ``Progress``."""
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
    """A judge of float rewrites, by the output error of the quantized model.

    Attributes:
        sqnr: returns the minimum output SQNR of a graph after quantization.
        best: minimum output SQNR before the next rewrite, in dB; None until needed.
    """

    sqnr: SqnrOf
    best: float | None = None

    def rejects(
        self,
        name: str,
        before: Graph,
        after: Graph,
        slowdown: float = 0.0,
        least_gain: float = 0.0,
    ) -> str:
        """Return why an optimizer's rewrite is rejected; empty if accepted.

        Args:
            slowdown: relative slowdown of the quantized model, which the gain has to justify.
            least_gain: least gain in dB, whatever the slowdown.
        """
        if self.best is None:
            # Quantizing the unchanged graph costs as much as a candidate, so that only a rewrite
            # causes it.
            self.best = self.sqnr(before, is_first=True)
        sqnr = None if self.best is None else self.sqnr(after)
        # Without a measurement nothing speaks against the rewrite, which ``unchanged`` has
        # verified.
        if self.best is None or sqnr is None:
            return ""
        # An equal SQNR suffices for a rewrite without a cost.
        if sqnr >= self.best + max(_PRICE * slowdown, least_gain):
            self.best = sqnr
            return ""
        reason = (
            f"{name}: left out; an output of the quantized model has {sqnr:.2f} dB"
            f" SQNR with it on samples held out, and {self.best:.2f} dB without"
        )
        if sqnr >= self.best:
            reason += ", too small a gain"
            if slowdown:
                reason += f" for {slowdown:.0%} more runtime (estimated)"
        # A note of the report: nothing is wrong, and nothing to be done.
        logger.info("%s", reason)
        return reason

    def is_good(self, graph: Graph) -> bool:
        """Return whether the quantized graph, as it is, needs no improvement."""
        if self.best is None:
            self.best = self.sqnr(graph, is_first=True)
        return self.best is not None and self.best >= GOOD


def optimize_float(  # noqa: PLR0913
    graph: Graph,
    config: QConfig,
    reference: Reference,
    sample: Sample | None,
    samples: Samples,
    sqnr: SqnrOf,
    *,
    show: bool | None = False,
) -> tuple[Graph, list[str]]:
    """Run the optimizers of the float stage in order.

    An optimizer that changes the outputs on the sample is rolled back; without a sample,
    verification is impossible. An optimizer for accuracy is rejected if it lowers the quantized
    model's accuracy on held-out samples.

    Args:
        graph: the float graph.
        config: the settings.
        reference: the float model.
        sample: the sample for verification.
        samples: calibration samples, for optimizers that need them.
        sqnr: returns the minimum output SQNR of a graph after quantization, in dB, on samples
            unseen by optimizers; where it returns None, no optimizer is rejected.
        show: whether to show a progress bar, as ``Progress`` takes it.

    Returns:
        The graph, and notes for the report.
    """
    takes = TARGETS[config.target].takes if config.target else None
    fused = takes is not None and takes.fuses
    rewriter = _Rewriter(
        graph, reference, sample, samples, _rounding(config), _Judge(sqnr), show, fused
    )
    for optimizer in config.optimizers:
        if optimizer.stage == "float":
            rewriter.apply(optimizer)
    return rewriter.graph, rewriter.notes


@dataclass
class _Rewriter:
    """A float graph that optimizers rewrite one after another.

    Attributes:
        graph: the graph with the accepted rewrites.
        reference: the float model.
        sample: the sample for verification; None leaves every optimizer out.
        samples: calibration samples.
        rounding: the rounding steps of the configuration.
        judge: compares quantized graphs.
        show: whether to show a progress bar, as ``Progress`` takes it.
        fused: the engine computes an activation function with the layer before it.
        notes: notes for the report.
    """

    graph: Graph
    reference: Reference
    sample: Sample | None
    samples: Samples
    rounding: Rounding
    judge: _Judge
    show: bool | None
    fused: bool
    notes: list[str] = field(default_factory=list)
    _outputs: dict[str, Any] = field(default_factory=dict)

    def apply(self, optimizer: FloatOptimizer) -> None:
        """Rewrite the graph by the first accepted variant of an optimizer.

        ``graph`` is replaced by the accepted rewrite, and ``notes`` tell the result.

        Args:
            optimizer: an optimizer of the float stage. Variants of an ``Adaptive`` one are tried
                from the greatest change to the least.
        """
        name = optimizer.name
        needless = self._needless(optimizer)
        if needless:
            self.notes.append(f"{name} was left out: {needless}")
            return
        variants = [(optimizer, 0.0)]
        if isinstance(optimizer, Adaptive):
            variants = optimizer.variants(self.graph, fused=self.fused)
        rewritten = False
        # From the greatest change to the least: the first that is worth its cost is taken.
        for variant, most_slowdown in variants:
            label = format_call(variant) if len(variants) > 1 else name
            # Optimizers work in place, and a rejected rewrite must leave no trace.
            candidate = self.graph.copy()
            shown = _Shown(self.samples, self.show, name)
            count = variant(candidate, shown, self.rounding)
            candidate.drop_unused()
            candidate.infer()
            remarks = prefixed(f"{name}: ", getattr(count, "notes", ()))
            if not count:
                # Only once, where no variant found anything to rewrite.
                if variant is variants[-1][0] and not rewritten:
                    self.notes += [f"{name}: nothing to do", *remarks]
                continue
            rewritten = True
            slowdown = most_slowdown * getattr(count, "share_of_slowdown", 1.0)
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

    def _needless(self, optimizer: FloatOptimizer) -> str:
        """Return why an optimizer is not run at all; empty if it is."""
        if self.sample is None:
            return "the model runs on no random sample, nothing could be verified"
        if optimizer.needs_data and not len(self.samples):
            return "it needs calibration data"
        # The comparison takes a calibration, which only optimizers with a least gain ask for.
        if getattr(optimizer, "least_gain", 0.0) and self.judge.is_good(self.graph):
            return f"without it every output has {GOOD:g} dB SQNR or more"
        return ""

    def _refused(
        self, optimizer: FloatOptimizer, label: str, candidate: Graph, slowdown: float
    ) -> str:
        """Return why a rewritten graph is rejected; empty if it is accepted.

        Args:
            optimizer: the optimizer, or its variant.
            label: its name in messages.
            slowdown: estimated relative slowdown of the quantized model.
        """
        assert self.sample is not None
        # Once for all optimizers: the outputs of the float model on the sample.
        if not self._outputs:
            self._outputs = self.reference.repeatable(self.sample)
        # Cheaper than quantizing both graphs, and therefore first.
        if optimizer.exact and not unchanged(candidate, self.sample, self._outputs):
            logger.warning(
                "%s changed the outputs of the model; it was rolled back", label
            )
            return f"{label} changed the outputs and was rolled back"
        if not optimizer.judged:
            return ""
        least_gain = getattr(optimizer, "least_gain", 0.0)
        return self.judge.rejects(label, self.graph, candidate, slowdown, least_gain)

    def _accept(
        self, optimizer: FloatOptimizer, label: str, candidate: Graph, count: int
    ) -> None:
        """Continue with a rewritten graph.

        Args:
            optimizer: the optimizer, or its variant.
            label: its name in notes.
            count: number of rewrites, for the note.
        """
        assert self.sample is not None
        note = f"{label}: {count}"
        self.graph = candidate
        # Later optimizers are compared with what this one made of the model, not with the original.
        if not optimizer.exact:
            outputs = run(candidate.to_model(), self.sample)
            self._outputs = {name: outputs[name] for name in self._outputs}
            note += f"; {_difference(candidate, self.reference, self.sample)}"
        self.notes.append(note)


def give_biases(graph: Graph, config: QConfig) -> None:
    """Add a zero bias to every layer without one, if an optimizer moves biases.

    Args:
        graph: the float graph; changed in place. A MatMul has no bias input and gets none.
        config: the settings, with the optimizers.
    """
    if not any(
        optimizer.stage == "layer" and optimizer.moves_bias
        for optimizer in config.optimizers
    ):
        return
    for node in graph.nodes:
        layer = Layer.of(graph, node)
        # MatMul has no bias input; an Add behind it may hold one.
        if layer is not None and node.kind != "MatMul" and not node.input(2):
            layer.set_bias(graph, np.zeros(layer.outputs(graph)), "zeros")


def _rounding(config: QConfig) -> Rounding:
    """Return the rounding steps of the configuration."""
    weight, activation = config.weight, config.activation
    return Rounding(
        weight=_steps(weight),
        per_channel=weight is None or weight.per_channel or bool(weight.block_size),
        activation=_steps(activation),
        symmetric=activation is not None and activation.symmetric,
    )


def _steps(spec: QuantizationSpec | None) -> int:
    """Return the number of steps in a range; 0 for float formats."""
    if spec is not None and isinstance(spec.dtype, Integer):
        return spec.grid.qmax - spec.grid.qmin
    return 0


def _difference(graph: Graph, reference: Reference, sample: Sample) -> str:
    """Return a description of the change of the outputs.

    Args:
        sample: the sample on which both are compared.
    """
    errors = measure(reference.remembering, open_session(graph.to_model()), [sample])
    worst = least_sqnr(errors, float("inf"))
    return (
        f"it changed the float model, whose outputs have {worst:.1f} dB SQNR on the"
        " first sample"
    )
