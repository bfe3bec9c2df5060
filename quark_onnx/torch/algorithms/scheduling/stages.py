"""Stages: layers of a block that can be quantized together, as none reads another's output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from quark_onnx.torch.algorithms.base import BlockJob
from quark_onnx.torch.calibration.block_stream import BlockArguments
from quark_onnx.torch.config.spec import LayerSpec as LayerSpec
from quark_onnx.torch.models.quantized_layer import Layers, split_input
from quark_onnx.torch.runtime import distributed


@dataclass(frozen=True)
class Stage:
    """Layers of a block without dependencies between them.

    Attributes:
        groups: names; layers of a group read the same tensor, and round it equally.
        last: the layer that runs last in every run; None for layers that run several times or, as
            experts, for some tokens.
        until: for each layer, the index of the last stage that reads its output, also through
            operators; the number of stages if the block's output depends on it.
    """

    groups: tuple[tuple[str, ...], ...]
    last: str | None = None
    until: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)


def stages_of(block: nn.Module, layers: Layers, call: BlockArguments) -> list[Stage]:
    """Return the layers of a block in the order of their dependencies.

    Args:
        block: a module.
        layers: layers of the block, by any names, with their quantization.
        call: a call of the block, which runs once.

    Returns:
        The stages. A layer that the call does not reach is a group by itself, in the stage of the
        layers with a similar name.

    >>> from torch import nn
    >>> block = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> layers = {"a": (block[0], LayerSpec()), "b": (block[2], LayerSpec())}
    >>> stages_of(block, layers, BlockArguments(torch.ones(1, 1, 2)))
    [Stage(groups=(('a',),), last='a'), Stage(groups=(('b',),), last='b')]
    """
    trace = _Trace()
    # only the edges of the autograd graph are needed: saved activations would take memory
    with (
        contextlib.ExitStack() as hooks,
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: None, lambda tensor: tensor
        ),
    ):
        for name, (layer, _) in layers.items():
            hook = trace.hook(name)
            hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
        # The hidden states require gradients, so that each operation on them leaves a node in the
        # graph.
        hidden = call.hidden.detach().clone().requires_grad_()
        result = BlockArguments(hidden, call.args, call.kwargs).run(block)
    levels = trace.levels()
    until = trace.until(levels, result.grad_fn)
    for name in layers:
        if name in levels:
            continue
        # The level of the first twin that runs; the first stage if there is none.
        twins = (other for other in levels if _twins(name, other))
        levels[name] = levels.get(next(twins, name), 0)
    groups_of_level: dict[int, dict[object, list[str]]] = {}
    for name in layers:
        # one group: the same tensor, rounded equally
        key = (trace.read.get(name, name), layers[name][1].input)
        groups = groups_of_level.setdefault(levels[name], {})
        groups.setdefault(key, []).append(name)
    # The order of execution, as hooks recorded it.
    order = {name: position for position, name in enumerate(trace.read)}
    tokens = call.hidden.shape[:-1].numel()
    stages = []
    for level in sorted(groups_of_level):
        stage_groups = tuple(tuple(group) for group in groups_of_level[level].values())
        names = [name for group in stage_groups for name in group]
        # A run may stop after the last layer only if each of them runs exactly once.
        last = None
        if all(name in order and trace.once(name, tokens) for name in names):
            leaders = [group[0] for group in stage_groups]
            last = max(leaders, key=order.__getitem__)
        ends = {name: until.get(name, level) for name in names}
        stages.append(Stage(stage_groups, last, ends))
    # the samples of other ranks may reach other experts
    return list(distributed.from_first(stages))


def stages_in(job: BlockJob, names: Iterable[str]) -> list[Stage]:
    """Return the stages of some layers of a block; blocks with equal layers are traced once."""
    layers = {name: job.layers[name] for name in names if name in job.layers}
    # Blocks with the same class, and layers of the same names, shapes and specs, have the same
    # stages.
    traits = [
        (job.local(name), layer.weight.shape, spec)
        for name, (layer, spec) in layers.items()
    ]
    key = (type(job.block), *traits)
    if key not in job.known:
        traced = stages_of(job.block, layers, job.calls[0])
        # each block chooses other experts
        if not all(stage.last for stage in traced):
            return traced
        job.known[key] = (job.name, traced)
    traced_name, stages = job.known[key]

    def here(name: str) -> str:
        return job.name + name.removeprefix(traced_name)

    return [_renamed(stage, here) for stage in stages]


def _renamed(stage: Stage, here: Callable[[str], str]) -> Stage:
    """Return the stage of an equal block, whose names ``here`` returns."""
    groups = tuple(tuple(here(name) for name in group) for group in stage.groups)
    until = {here(name): index for name, index in stage.until.items()}
    return Stage(groups, stage.last and here(stage.last), until)


def _twins(name: str, other: str) -> bool:
    """Return whether names differ only in numbers, as those of experts do."""
    parts, other_parts = name.split("."), other.split(".")
    return len(parts) == len(other_parts) and all(
        a == b or (a.isdigit() and b.isdigit())
        for a, b in zip(parts, other_parts, strict=True)
    )


class _Trace:
    """Record of the position of each layer in the autograd graph."""

    def __init__(self) -> None:
        self._inputs: dict[str, Node | None] = {}
        self._layer_of: dict[Node | None, str] = {}
        # addresses are keys: no tensor may be freed
        self._alive: list[torch.Tensor] = []
        # address and shape of the input, for each run of a layer
        self.read: dict[str, tuple[Any, ...]] = {}

    def hook(self, name: str) -> Callable[..., torch.Tensor]:
        """Return the forward hook of a layer."""

        def hook(
            module: nn.Module,
            args: tuple[Any, ...],
            named: dict[str, Any],
            output: torch.Tensor,
        ) -> torch.Tensor:
            x = split_input(args, named)[0]
            self._alive.append(x)
            # The last run counts for layers that run several times.
            self._inputs[name] = x.grad_fn
            self.read[name] = (*self.read.get(name, ()), (x.data_ptr(), x.shape))
            # The output of a layer without gradients, such as an embedding of indices.
            if output.grad_fn is None:
                output = output.detach().requires_grad_()
            # clone() adds a node to the graph that belongs to this layer alone
            output = output.clone()
            self._layer_of[output.grad_fn] = name
            return output

        return hook

    def once(self, name: str, tokens: int) -> bool:
        """Return whether a layer runs once, on all tokens."""
        runs = self.read[name]
        return len(runs) == 1 and runs[0][1][:-1].numel() == tokens

    def levels(self) -> dict[str, int]:
        """Return the number of layers on the longest path before each layer."""
        levels: dict[str, int] = {}
        # in the order of execution: the producers of an input have a level already
        for name in self._inputs:
            nearest = self._nearest_layers(self._inputs[name])
            before = [levels[layer] for layer in nearest if layer in levels]
            levels[name] = 1 + max(before, default=-1)
        return levels

    def until(self, levels: Mapping[str, int], result: Node | None) -> dict[str, int]:
        """Return the greatest level that reads each layer's output; the result comes last."""
        until = dict[str, int]()
        # Pairs of a node and the level that reads it.
        ends = [(self._inputs[name], level) for name, level in levels.items()]
        ends.append((result, 1 + max(levels.values(), default=-1)))
        for node, level in ends:
            for name in self._nearest_layers(node):
                until[name] = max(level, until.get(name, level))
        return until

    def _nearest_layers(self, node: Node | None) -> Iterator[str]:
        """Yield the nearest layers that a tensor depends on, along each path."""
        # Depth first, without recursion: the graph of a block may be deep.
        todo = [node]
        seen = {node}
        while todo:
            node = todo.pop()
            if node is None:
                continue
            if node in self._layer_of:
                yield self._layer_of[node]
                continue
            for after, _ in node.next_functions:
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
