"""Collect the Hessians of the layers of one stage of a decoder block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quark_onnx.common.errors import DataError
from quark_onnx.torch.algorithms.base import BlockJob
from quark_onnx.torch.algorithms.gptq.triangular import add_products, mirror
from quark_onnx.torch.algorithms.memory import Shapes, first_number
from quark_onnx.torch.algorithms.rescaling.channel_pairs import pattern_of
from quark_onnx.torch.algorithms.scheduling.replay import Replay
from quark_onnx.torch.algorithms.scheduling.stages import Stage, stages_in
from quark_onnx.torch.calibration.block_stream import BlockArguments
from quark_onnx.torch.formats.quantized_tensor import Quantized, joined
from quark_onnx.torch.models.names import input_hooks
from quark_onnx.torch.models.quantized_layer import split_input
from quark_onnx.torch.runtime import distributed


@dataclass
class HessianStats:
    """Second moments of the inputs of a layer, as sums over tokens.

    x is an input of the quantized model, as the layer rounds it, and d the difference of the float
    model's input to x. ``xd`` and ``dd`` are None where d is not known.

    Attributes:
        xx: (inputs, inputs) float32, the Hessian X^T X.
        xd: (inputs, inputs), X^T D.
        dd: (inputs, inputs), D^T D.
        count: tokens.
    """

    xx: torch.Tensor | None = None
    xd: torch.Tensor | None = None
    dd: torch.Tensor | None = None
    count: int = 0

    def add(self, x: torch.Tensor, exact: torch.Tensor | None = None) -> None:
        """Add the inputs of a run; symmetric sums get their upper triangles only.

        Args:
            x: (tokens, inputs), of the quantized model.
            exact: (tokens, inputs), of the float model; None where tokens cannot be matched.
        """
        shape = (x.shape[1], x.shape[1])
        if self.xx is None:
            self.xx = x.new_zeros(shape)
        # A sum in float32: inputs were converted by the caller.
        add_products(self.xx, x)
        self.count += len(x)
        if exact is None:
            return
        if self.xd is None or self.dd is None:
            self.xd = x.new_zeros(shape)
            self.dd = x.new_zeros(shape)
        # X^T D is not symmetric, and needs the full product.
        self.xd.addmm_(x.t(), exact - x)
        add_products(self.dd, exact - x)

    def completed(self) -> HessianStats:
        """Fill the symmetric sums, and return ``self``.

        Panels of other processes and the lower triangles are added.
        """
        for symmetric in (self.xx, self.dd):
            if symmetric is not None:
                mirror(distributed.summed(symmetric))
        return self


class _AllRead(Exception):  # noqa: N818
    """Ends a run of a block once all watched layers have run."""


@dataclass
class _InputReader:
    """Runs a block and records the inputs of some layers.

    Attributes:
        block: the module.
        layers: the watched layers, by their names in the model.
        last: the layer after which the run may end; None for the end of the block.
        inputs: the recorded inputs of the current run, by layer.
    """

    block: nn.Module
    layers: Mapping[str, nn.Module]
    last: str | None
    inputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def run(self, call: BlockArguments) -> dict[str, list[torch.Tensor]]:
        """Run the block, and return the inputs of each layer within reach."""
        self.inputs = {}
        with input_hooks(self.layers, self._hook), contextlib.suppress(_AllRead):
            call.run(self.block)
        return self.inputs

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(
            module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
        ) -> None:
            x = split_input(args, named)[0]
            self.inputs.setdefault(name, []).append(x.detach())
            # Further layers of the block would be computed for nothing.
            if name == self.last:
                raise _AllRead

        return hook


def collect_hessians(
    job: BlockJob,
    stage: Stage,
    before: Mapping[str, nn.Module] | Replay,
    *,
    exact: bool,
) -> dict[str, HessianStats]:
    """Run a block on the samples, and sum the products of layers' inputs.

    Args:
        job: the block.
        stage: the layers to watch.
        before: quantized layers of earlier stages, by their names, or the replay that runs them.
        exact: compare with the float model. Experts are not compared: the router of the quantized
            model may give them other tokens.

    Returns:
        The sums, by the name of the first layer of each group.

    Raises:
        DataError: an input is infinite or not a number.
    """
    # Layers of a group read the same tensor and round it equally: one hook serves the group.
    names = [group[0] for group in stage.groups]
    leaders = {name: job.block.get_submodule(job.local(name)) for name in names}
    # Inputs are rounded as the quantized layer rounds them before it multiplies them.
    quantized_layers = job.quantized({}, leaders)
    roundings = {name: layer.input for name, layer in quantized_layers.items()}
    reader = _InputReader(job.block, leaders, stage.last)
    stats = {name: HessianStats() for name in leaders}
    samples = _inputs(job, reader, before, roundings, exact=exact)
    device = job.layers[names[0]][0].weight.device
    for sample in distributed.in_order(samples, device):
        for name, tensors in sample.items():
            stats[name].add(*tensors)
    for name, layer_stats in stats.items():
        H = layer_stats.completed().xx
        # The diagonal suffices: by Cauchy-Schwarz no other element exceeds it.
        if H is not None and not torch.isfinite(H.diagonal()).all():
            raise DataError(
                f"what {name} reads is infinite or no number on the calibration data",
            )
    return stats


def hessians_by_stage(
    job: BlockJob, names: Iterable[str], codes: Mapping[str, Quantized], *, exact: bool
) -> Iterator[tuple[tuple[str, ...], HessianStats]]:
    """Yield the layers of a block in groups with equal inputs, each with its sums.

    Args:
        job: the block, which gets a replay.
        names: the layers.
        codes: the codes of the layers. The caller replaces those of a group before it takes the
            next one: the layers of later stages read the outputs.
        exact: compare with the float model.
    """
    stages = stages_in(job, names)
    job.replay = Replay(job, stages, codes)
    for index, stage in enumerate(stages):
        job.replay.begin(index)
        stats = collect_hessians(job, stage, job.replay, exact=exact)
        # Dequantized weights are not needed while codes are chosen.
        job.replay.rest()
        for group in stage.groups:
            # Removed, so that each Hessian is freed as soon as its group is done.
            yield group, stats.pop(group[0])
    job.replay.begin(len(stages))


def _inputs(
    job: BlockJob,
    reader: _InputReader,
    before: Mapping[str, nn.Module] | Replay,
    roundings: Mapping[str, Any],
    *,
    exact: bool,
) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Yield the arguments of ``HessianStats.add`` by layer, sample by sample."""
    for index, (call, float_call) in enumerate(zip(job.calls, job.floats, strict=True)):
        # The float model's own hidden states, through the block's float layers.
        exact_inputs = reader.run(float_call) if exact else {}
        if isinstance(before, Replay):
            inputs = before.run(index, call, reader.run)
        else:
            with job.put(before):
                inputs = reader.run(call)
        tokens = call.hidden.numel() // call.hidden.shape[-1]
        arguments = dict[str, list[torch.Tensor]]()
        for name, tensors in inputs.items():
            rounding = roundings[name]
            x = _rows(tensors if rounding is None else map(rounding, tensors))
            arguments[name] = [x]
            if name not in exact_inputs:
                continue
            exact_x = _rows(exact_inputs[name])
            # a layer that sees each token once is comparable row by row; an expert is not
            if len(x) == len(exact_x) == tokens:
                arguments[name].append(exact_x)
        yield arguments


def _rows(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the inputs of all runs of a layer as rows, (tokens, inputs) float32."""
    rows: torch.Tensor = joined([x.reshape(-1, x.shape[-1]).float() for x in tensors])
    return rows


def largest_stage(shapes: Shapes) -> int:
    """Return the number of Hessian elements in the largest stage.

    All experts of a block belong to one stage.
    """
    stages = dict[tuple[str, str, int], int]()
    for parent, inputs in shapes.groups:
        # The block's number, and the parent's name without numbers: experts fall together.
        key = (first_number(parent), pattern_of(parent), inputs)
        stages[key] = stages.get(key, 0) + inputs**2
    return max(stages.values(), default=0)
