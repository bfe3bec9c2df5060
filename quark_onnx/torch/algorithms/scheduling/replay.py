"""Run a block stage by stage, with the outputs of earlier layers from memory.

A run that stops at a stage leaves what its layers read. The next one computes of it what these
layers make of it with their codes; all layers before are not run again: what is still read of them
is kept, and where nothing is, they hand out a blank, so that it shows where it is read after all.
The block is run as it is then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quark_onnx.torch.algorithms.base import BlockJob
from quark_onnx.torch.algorithms.scheduling.meta_tensor import MetaTensor
from quark_onnx.torch.algorithms.scheduling.stages import Stage
from quark_onnx.torch.calibration.block_stream import Call
from quark_onnx.torch.formats.quantized_tensor import Quantized

#: Bytes that are kept of all samples, at least; where the block is greater, as many as it has.
LEAST = 1 << 26


@dataclass
class _Kept:
    """The stored tensors of a sample.

    Attributes:
        reads: what the first layers of the groups of a stage read, by their names.
        results: what layers have computed that is still read, by their names.
        blanks: what else they have computed, without memory.
    """

    reads: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    blanks: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Memory in bytes."""
        return sum(
            each.numel() * each.element_size()
            for each in (*self.reads.values(), *self.results.values())
        )


class Replay:
    """The runs of a block that is quantized stage by stage.

    Args:
        job: the block.
        stages: its stages, in their order.
        made: codes of its layers, which grow better; those of a stage are not changed once a run
            has stopped behind it.
    """

    def __init__(
        self,
        job: BlockJob,
        stages: Sequence[Stage],
        made: Mapping[str, Quantized],
    ) -> None:
        self._job = job
        self._stages = stages
        self._made = made
        self._kept = dict[int, _Kept]()
        size = sum(
            each.numel() * each.element_size() for each in job.block.parameters()
        )
        # layers that are run several times, or by chance, have not computed one thing
        if all(stage.last for stage in stages):
            self._limit = max(LEAST, size)
        else:
            self._limit = 0
        self.begin(0)

    def begin(self, place: int) -> None:
        """Let runs stop at a stage; after the last stage, runs go to the end."""
        self._place = place
        self.rest()

    def rest(self) -> None:
        """Release the quantized layers until the next run."""
        self._layers = dict[str, Any]()

    def run(self, index: int, call: Call, run: Callable[[Call], Any]) -> Any:
        """Run the block on a sample.

        Args:
            index: the index of the sample.
            call: the call of the block.
            run: runs the block, and returns the inputs of layers by name, a list for the runs of
                each layer, or a tensor.
        """
        kept = self._kept.pop(index, None) if self._place else _Kept()
        if kept is None:
            return self._whole(call, run)
        new = _Kept(blanks=dict(kept.blanks))
        versions = {name: result._version for name, result in kept.results.items()}
        with self._standing_in(kept, new):
            try:
                found = run(call)
            except (
                Exception
            ):  # it has asked for the numbers of a blank, or fails in any case
                found = None
        if found is None or isinstance(found, torch.Tensor):
            reads = {"": [found]}
        else:
            reads = found
        if any(
            each is None or isinstance(each, MetaTensor)
            for parts in reads.values()
            for each in parts
        ):
            return self._whole(call, run)  # what nothing should have read was read
        unchanged = all(
            result._version == versions.get(name, 0)
            for name, result in new.results.items()
        )
        if self._limit and self._place < len(self._stages) and unchanged:
            new.reads = {name: parts[0] for name, parts in reads.items()}
            if new.size + sum(each.size for each in self._kept.values()) <= self._limit:
                self._kept[index] = new
        return found

    def result(self, index: int, call: Call) -> Any:
        """Return the hidden states of a sample after the block, with all layers quantized."""
        stages = {
            name for stage in self._stages for group in stage.groups for name in group
        }
        beside = {
            name: self._layer(name) for name in self._job.layers if name not in stages
        }
        with self._job.put(beside):
            return self.run(index, call, lambda call: call.run(self._job.block))

    def _whole(self, call: Call, run: Callable[[Call], Any]) -> Any:
        with self._job.put({name: self._layer(name) for _, _, name in self._before()}):
            return run(call)

    def _before(self) -> Iterator[tuple[int, str, str]]:
        """Yield the layers of earlier stages: index of the stage, leader of the group, and name."""
        for place, stage in enumerate(self._stages[: self._place]):
            yield from (
                (place, group[0], name) for group in stage.groups for name in group
            )

    def _layer(self, name: str) -> Any:
        if name not in self._layers:
            self._layers |= self._job.quantized(self._made, [name])
        return self._layers[name]

    @contextlib.contextmanager
    def _standing_in(self, kept: _Kept, new: _Kept) -> Iterator[None]:
        """Let layers return their stored outputs, or compute them from stored inputs."""
        modules = dict[str, Any]()
        own = dict[str, Any]()
        for place, leader, name in self._before():
            module = modules[name] = self._job.block.get_submodule(
                self._job.local(name),
            )
            own[name] = vars(module).get("forward")
            until = self._stages[place].until[name]
            keep = until > self._place
            if place == self._place - 1:
                module.forward = self._computing(
                    name,
                    kept.reads.get(leader),
                    new,
                    keep=keep,
                )
            elif name in kept.results:
                module.forward = _handing(kept.results[name])
                if keep:
                    new.results[name] = kept.results[name]
                else:
                    new.blanks[name] = kept.results[name].to("meta")
            elif name in kept.blanks:
                module.forward = _handing(
                    MetaTensor.of(kept.blanks[name], module.weight.device),
                )
            else:
                # all runs so far have stopped before it, though none of its stage depends on what
                # comes between
                module.forward = self._computing(name, None, new, keep=keep)
        try:
            yield
        finally:
            for name, module in modules.items():
                del module.forward
                if own[name] is not None:  # another library's
                    module.forward = own[name]

    def _computing(self, name: str, x: Any, new: _Kept, *, keep: bool) -> Any:
        """Return a forward that computes with the codes of a layer, and stores the result.

        Args:
            name: the layer.
            x: the stored input; None for the input of the call.
            new: the storage of the result.
            keep: store the result; otherwise only its shape and type.
        """

        def forward(*args: Any, **named: Any) -> Any:
            if x is None:
                found = self._layer(name)(*args, **named)
            else:
                found = self._layer(name)(x)
            if isinstance(found, MetaTensor):
                return found
            if keep:
                new.results[name] = found
            else:
                new.blanks[name] = found.to("meta")
            return found

        return forward


def _handing(result: Any) -> Any:
    return lambda *args, **named: result
