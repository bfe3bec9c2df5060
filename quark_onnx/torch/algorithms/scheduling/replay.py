"""Run a block stage by stage, with the outputs of earlier layers from memory.

A run that stops at a stage stores the inputs of the stage's layers. The next run computes the
outputs of these layers from the stored inputs, with quantized weights. Earlier layers do not run
again: outputs that later layers read are stored, and meta tensors take the place of the others. A
model that reads a meta tensor after all raises an error, and the whole block runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quark_onnx.torch.algorithms.base import BlockJob
from quark_onnx.torch.algorithms.memory import Shapes
from quark_onnx.torch.algorithms.scheduling.meta_tensor import MetaTensor
from quark_onnx.torch.algorithms.scheduling.stages import Stage
from quark_onnx.torch.calibration.block_stream import BlockArguments
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.names import replaced_forwards
from quark_onnx.torch.models.quantized_layer import QuantizedLayer

#: Bytes for the stored tensors of all samples; the size of the block, if that is greater.
LEAST = 1 << 26


@dataclass
class _Kept:
    """The stored tensors of a sample.

    Attributes:
        inputs: the inputs of a stage, by the first layer of each group.
        outputs: outputs that later stages read, by layer.
        meta: shapes and types of the other outputs, by layer, on the meta device.
    """

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    meta: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Memory in bytes."""
        return _bytes_of((*self.inputs.values(), *self.outputs.values()))


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the memory of tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Replay:
    """The runs of a block that is quantized stage by stage.

    Args:
        job: the block.
        stages: the stages of the block, in order.
        quantized_weights: the codes of the layers. The caller improves them stage by stage; the
            codes of a stage are final once a run has passed the stage.
    """

    def __init__(
        self,
        job: BlockJob,
        stages: Sequence[Stage],
        quantized_weights: Mapping[str, Quantized],
    ) -> None:
        self._job = job
        self._stages = stages
        self._quantized_weights = quantized_weights
        self._kept = dict[int, _Kept]()
        # a layer that runs several times, or an expert that runs for some samples, has no single
        # output to store
        self.limit = 0
        if all(stage.last for stage in stages):
            self.limit = max(LEAST, _bytes_of(job.block.parameters()))
        self.begin(0)

    def begin(self, stage: int) -> None:
        """Let runs stop at a stage; after the last stage, runs go to the end."""
        self._stage = stage
        self.rest()

    def rest(self) -> None:
        """Release the quantized layers until the next run."""
        # Dequantized weights of earlier stages are large, and needed during runs alone.
        self.decoded = dict[str, QuantizedLayer]()

    def run(
        self, index: int, call: BlockArguments, run: Callable[[BlockArguments], Any]
    ) -> Any:
        """Run the block on a sample.

        Args:
            index: the index of the sample.
            call: the call of the block.
            run: runs the block, and returns the inputs of layers by name, a list for the runs of
                each layer, or a tensor.
        """
        # Stage 0 has nothing before it that could be stored. Popped: a sample's tensors are
        # replaced by those of its next run.
        kept: _Kept | None = _Kept()
        if self._stage:
            kept = self._kept.pop(index, None)
        if kept is None:
            return self._run_fully(call, run)
        new = _Kept(meta=dict(kept.meta))
        # torch counts in-place changes of a tensor: a block that changes a stored output makes it
        # useless.
        versions = {name: output._version for name, output in kept.outputs.items()}
        with self._replaced_layers(kept, new):
            try:
                result = run(call)
            # A meta tensor was read; any other error comes again below.
            except Exception:
                result = None
        inputs: Mapping[str, list[Any]] = result
        if isinstance(result, torch.Tensor | None):
            inputs = {"": [result]}
        tensors = [tensor for runs in inputs.values() for tensor in runs]
        # None: the run has raised an error. A meta tensor has reached the result.
        if any(isinstance(tensor, MetaTensor | None) for tensor in tensors):
            return self._run_fully(call, run)
        unchanged = all(
            output._version == versions.get(name, 0)
            for name, output in new.outputs.items()
        )
        # Nothing to store after the last stage. A sample that does not fit is run as a whole next
        # time.
        if self.limit and self._stage < len(self._stages) and unchanged:
            new.inputs = {name: runs[0] for name, runs in inputs.items()}
            stored = sum(sample.size for sample in self._kept.values())
            if new.size + stored <= self.limit:
                self._kept[index] = new
        return result

    def result(self, index: int, call: BlockArguments) -> torch.Tensor:
        """Return the hidden states of a sample after the block, with all layers quantized."""
        # Layers that no stage covers, such as convolutions, run with their codes as well.
        groups = [group for stage in self._stages for group in stage.groups]
        staged = {name for group in groups for name in group}
        unstaged = [name for name in self._job.layers if name not in staged]
        with self._job.put(self._layers(unstaged)):
            hidden: torch.Tensor = self.run(
                index, call, lambda call: call.run(self._job.block)
            )
        return hidden

    def _run_fully(
        self, call: BlockArguments, run: Callable[[BlockArguments], Any]
    ) -> Any:
        names = [name for _, _, name in self._before()]
        with self._job.put(self._layers(names)):
            return run(call)

    def _before(self) -> Iterator[tuple[int, str, str]]:
        """Yield the layers of earlier stages: index of the stage, leader of the group, and name."""
        for index, stage in enumerate(self._stages[: self._stage]):
            for group in stage.groups:
                for name in group:
                    yield index, group[0], name

    def _layers(self, names: Iterable[str]) -> dict[str, QuantizedLayer]:
        return {name: self._layer(name) for name in names}

    def _layer(self, name: str) -> QuantizedLayer:
        # Decoded once for all samples of a stage.
        if name not in self.decoded:
            self.decoded |= self._job.quantized(self._quantized_weights, [name])
        return self.decoded[name]

    @contextlib.contextmanager
    def _replaced_layers(self, kept: _Kept, new: _Kept) -> Iterator[None]:
        """Let layers return their stored outputs, or compute them from stored inputs."""
        modules = dict[str, nn.Module]()
        forwards = dict[str, Callable[..., torch.Tensor]]()
        for index, leader, name in self._before():
            module = self._job.block.get_submodule(self._job.local(name))
            modules[name] = module
            # Stored as long as a later stage, or the result of the block, reads the output.
            until = self._stages[index].until[name]
            keep = until > self._stage
            if index == self._stage - 1:
                x = kept.inputs.get(leader)
                forwards[name] = self._computing(name, x, new, keep=keep)
            elif name in kept.outputs:
                forwards[name] = _returning(kept.outputs[name])
                if keep:
                    new.outputs[name] = kept.outputs[name]
                else:
                    new.meta[name] = kept.outputs[name].to("meta")
            elif name in kept.meta:
                device = self._job.layers[name][0].weight.device
                forwards[name] = _returning(MetaTensor.of(kept.meta[name], device))
            else:
                # earlier runs have stopped before this layer, although the layers of its stage do
                # not depend on the layers between
                forwards[name] = self._computing(name, None, new, keep=keep)
        with replaced_forwards(modules, forwards):
            yield

    def _computing(
        self, name: str, x: torch.Tensor | None, new: _Kept, *, keep: bool
    ) -> Callable[..., torch.Tensor]:
        """Return a forward that computes with the codes of a layer, and stores the result.

        Args:
            x: the stored input; None for the input of the call.
            new: the storage of the result.
            keep: store the result; otherwise only its shape and type.
        """

        def forward(*args: Any, **named: Any) -> torch.Tensor:
            layer = self._layer(name)
            output: torch.Tensor = layer(*args, **named) if x is None else layer(x)
            # The layer's input was computed from meta tensors: nobody reads the output.
            if isinstance(output, MetaTensor):
                return output
            if keep:
                new.outputs[name] = output
            else:
                new.meta[name] = output.to("meta")
            return output

        return forward


def _returning(result: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda *args, **named: result


def stored_bytes(shapes: Shapes) -> int:
    """Return the estimated bytes of the tensors that are stored for the stages of a block."""
    widths = [inputs for _, inputs in shapes.layers.values()] or [0]
    # Per token, the widest and the narrowest input of layers.
    wanted = shapes.tokens * (max(widths) + min(widths)) * shapes.itemsize
    return min(wanted, max(LEAST, shapes.block))
