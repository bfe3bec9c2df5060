"""Accumulate the Hessians X X^T of the linear layers that run in one stage of a decoder block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quark_onnx.errors import DataError
from quark_onnx.torch.algorithms.base import BlockJob
from quark_onnx.torch.algorithms.gptq.triangular import add_products, mirror
from quark_onnx.torch.algorithms.scheduling.replay import Replay
from quark_onnx.torch.algorithms.scheduling.stages import Stage
from quark_onnx.torch.calibration.block_stream import Call
from quark_onnx.torch.formats.quantized_tensor import joined
from quark_onnx.torch.models.quantized_layer import kind_of, outputs_first, split_input
from quark_onnx.torch.runtime import distributed


@dataclass
class Gram:
    """What a layer reads, as sums over tokens.

    Attributes:
        own: (inputs, inputs) float32, products of two inputs, as they are rounded, in the quantized
            model.
        off: (inputs, inputs), products of such an input with how far another one is from that of
            the float model, the second one along the rows; None where nothing is known of it.
        gap: (inputs, inputs), products of how far two inputs are from those of the float model;
            None as ``off``.
        count: tokens.
    """

    own: Any = None
    off: Any = None
    gap: Any = None
    count: int = 0

    def add(self, x: Any, exact: Any = None) -> None:
        """Take in what a run has shown; (tokens, inputs) each, ``exact`` of the float model. Of
        symmetric matrices the upper half is summed up.
        """
        if self.own is None:
            self.own = x.new_zeros((x.shape[1], x.shape[1]))
        add_products(self.own, x)
        self.count += len(x)
        if exact is not None:
            if self.off is None:
                self.off, self.gap = (
                    x.new_zeros((x.shape[1], x.shape[1])) for _ in range(2)
                )
            self.off.addmm_(x.t(), exact - x)
            add_products(self.gap, exact - x)

    def whole(self) -> Gram:
        """With both halves of symmetric matrices, of which one is summed up."""
        for part in (self.own, self.gap):
            if part is not None:
                mirror(part)
        return self

    def over_ranks(self, inputs: int, device: Any) -> Gram:
        """The sums over all processes."""
        if distributed.count() == 1:
            return self
        tokens = distributed.number(self.count)
        if not tokens:
            return Gram()
        known = distributed.number(int(self.off is not None))
        own, off, gap = (
            torch.zeros(inputs, inputs, device=device) if part is None else part
            for part in (self.own, self.off, self.gap)
        )
        if not known:
            return Gram(distributed.summed(own), count=tokens)
        return Gram(
            distributed.summed(own),
            distributed.summed(off),
            distributed.summed(gap),
            tokens,
        )


class _Enough(Exception):  # noqa: N818
    """Ends a run of a block once all that is watched has been reached."""


@dataclass
class _Reading:
    """Context manager: what leaders of groups read in one run of a block."""

    block: Any
    leaders: Mapping[str, Any]
    last: str | None
    found: dict[str, list[Any]] = field(default_factory=dict)

    def run(self, call: Call) -> dict[str, list[Any]]:
        """What each layer that the call reaches reads, each time that it is run."""
        self.found = {}
        hooks = [
            layer.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            for name, layer in self.leaders.items()
        ]
        try:
            with contextlib.suppress(_Enough):
                call.run(self.block)
        finally:
            for hook in hooks:
                hook.remove()
        return self.found

    def _hook(self, name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = split_input(args, named)[0]
            self.found.setdefault(name, []).append(x.detach())
            if name == self.last:
                raise _Enough

        return hook


def grams_of(
    job: BlockJob,
    stage: Stage,
    before: Mapping[str, Any] | Replay,
    *,
    exact: bool,
) -> dict[str, Gram]:
    """Run the block on all samples.

    Args:
        stage: whose layers are watched.
        before: quantized layers of the stages before it, by their names, or what runs the block
            with them.
        exact: whether to compare with the float model; where experts read, which may be others
            there, it is not done.

    Returns:
        By the name of the first layer of each group.

    Raises:
        DataError: a layer reads numbers that are infinite or none.
    """
    leaders = {
        group[0]: job.block.get_submodule(job.local(group[0])) for group in stage.groups
    }
    rounding: dict[str, Any] = {
        name: layer.input for name, layer in job.quantized({}, leaders).items()
    }
    reading = _Reading(job.block, leaders, stage.last)
    found = {name: Gram() for name in leaders}
    for index, (call, plain) in enumerate(zip(job.calls, job.floats, strict=True)):
        if exact:
            wanted = reading.run(plain)
        else:
            wanted = {}
        if isinstance(before, Replay):
            seen = before.run(index, call, reading.run)
        else:
            with job.put(before):
                seen = reading.run(call)
        tokens = call.hidden.numel() // call.hidden.shape[-1]
        for name, reads in seen.items():
            left = _rows(
                reads if rounding[name] is None else map(rounding[name], reads),
            )
            if name in wanted:
                plain_rows = _rows(wanted[name])
            else:
                plain_rows = None
            aligned = plain_rows is not None and len(left) == len(plain_rows) == tokens
            found[name].add(left, plain_rows if aligned else None)
    weights = {
        name: outputs_first(layer.weight, kind_of(layer))
        for name, layer in leaders.items()
    }
    found = {
        name: gram.over_ranks(weights[name].shape[1], weights[name].device)
        for name, gram in found.items()
    }
    for name, gram in found.items():
        if gram.own is not None and not torch.isfinite(gram.own.diagonal()).all():
            raise DataError(
                f"what {name} reads is infinite or no number on the calibration data",
            )
    return {name: gram.whole() for name, gram in found.items()}


def _rows(reads: Iterable[Any]) -> Any:
    """(tokens, inputs) float32, of all runs of a layer."""
    return joined([x.reshape(-1, x.shape[-1]).float() for x in reads])
