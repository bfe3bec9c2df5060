"""Plan the rotation of each weight of a language model by probing, and verify the plan.

Root mean squares do not change under a rotation, but means do. If a layer normalization subtracts
the mean, the rotation is one that keeps the vector of ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.kernels.hadamard import balanced, random_hadamard
from quark_onnx.torch.algorithms.rotation.embeddings_and_head import EmbeddingsAndHead
from quark_onnx.torch.algorithms.rotation.residual_stream import (
    ModelPart,
    StreamRole,
    floats_of,
    in_float32,
)
from quark_onnx.torch.algorithms.rotation.settings import Rotation
from quark_onnx.torch.algorithms.rotation.weight_rewrites import (
    HEADS,
    STREAM,
    WeightRewrites,
    fold_heads,
    fold_online,
    fold_stream,
)
from quark_onnx.torch.calibration.block_stream import BlockArguments, BlockStream, moved
from quark_onnx.torch.models.names import input_hooks
from quark_onnx.torch.models.online_rotation import OnlineRotation, OrthogonalMatrix
from quark_onnx.torch.models.structure import blocks_of, put_modules

#: The greatest relative error of the rotated model, in float32.
_TOLERANCE = 1e-4


class Rotator:
    """The planner of the rewrites of a model; the model is unchanged.

    Args:
        model: the model. The modules outside of its blocks, and the first block, have their
            weights; the head has a weight of its own.
        settings: the rotations.
        batch: a short sample.

    Attributes:
        blocks: the blocks of the model, by name.
        hidden: the input of the first block for the sample, in float32.
        centered: whether a norm subtracts means.
        rotations: the rotations, by name.

    Raises:
        ModelError: the model cannot be rotated.
    """

    def __init__(self, model: nn.Module, settings: Rotation, batch: Any) -> None:
        self.settings = settings
        self.blocks = stream_blocks(model)
        batch = moved(batch, next(model.parameters()).device)
        # Only the first block runs: the stream records the arguments of all others.
        self._walk = BlockStream(model, self.blocks, [batch])
        self.rotations = dict[str, OrthogonalMatrix]()
        name = next(iter(self.blocks))
        first = self.blocks[name]
        call = self.call(name)
        form = _raw(first, floats_of(first), call, call.hidden)
        self._outside = EmbeddingsAndHead(model, self.blocks, batch, form)
        self.hidden = call.hidden
        self._size = call.hidden.shape[-1]
        # Without R1, nothing outside of the blocks is rotated.
        self._back = self._outside.back().read(call.hidden) if settings.r1 else ()
        readings = (*self._back, *_part(name, first, call).read(call.hidden))
        self.centered = any(reading.centered for reading in readings)

    def call(self, name: str) -> BlockArguments:
        """Return the call of a block for the sample, in float32.

        The hidden states are those before all blocks.

        Raises:
            ModelError: the sample does not reach the block.
        """
        calls = self._walk.calls(name)
        if not calls:
            raise ModelError(
                f"{name} is not run on the sample, so that nobody knows what it does;"
                " it cannot be rotated",
            )
        # bfloat16 would drown the tolerance of the comparison in rounding noise.
        return BlockArguments(
            in_float32(calls[0].hidden),
            in_float32(tuple(calls[0].args)),
            in_float32(dict(calls[0].kwargs)),
        )

    def outside(self) -> tuple[WeightRewrites, float]:
        """Return the rewrites of embeddings, last norm and head, and the relative error."""
        if not self.settings.r1:
            return WeightRewrites(), 0.0
        self._outside.check_reached()
        hidden = self.hidden
        front = self._outside.front()
        back = self._outside.back()
        # The last norm and the head read the stream, and cannot write to it.
        readings = [(reading.norm, *reading.readers) for reading in self._back]
        reading_names = [name for names in readings for name in names if name]
        writers = front.written(None, self._size, reading_names)
        if not reading_names or not writers:
            raise ModelError(
                f"nothing {'reads' if writers else 'writes'} the residual stream"
                " outside of the blocks",
            )
        plan = fold_stream(back, StreamRole(self._back, writers), self._size)
        tensors = self._outside.tensors()
        changed = self._changed(plan, tensors.__getitem__)
        turn = self.rotation(STREAM, plan).turn
        embedded, logits = self._outside.run(hidden)
        new_embedded, new_logits = self._outside.run(turn(hidden), changed)
        # Embeddings must come out rotated, and the logits of rotated hidden states be the same.
        errors = [_error(turn(embedded), new_embedded), _error(logits, new_logits)]
        return plan, _checked("what surrounds the blocks", max(errors))

    def block(
        self, name: str, hidden: torch.Tensor
    ) -> tuple[WeightRewrites, float, torch.Tensor]:
        """Return the rewrites of a block whose weights are loaded.

        Args:
            name: name of the block.
            hidden: input of the block, (samples, tokens, features).

        Returns:
            The plan, the relative error, and the output of the block.
        """
        block = self.blocks[name]
        call = self.call(name)
        call = BlockArguments(in_float32(hidden), call.args, call.kwargs)
        part = _part(name, block, call)
        plan = self._plan(part, call.hidden)
        tensors = {f"{name}.{key}": tensor for key, tensor in floats_of(block).items()}
        changed = self._changed(plan, tensors.__getitem__)
        before = part.run(call.hidden)
        turn = _same
        if self.settings.r1:
            turn = self.rotation(STREAM, plan).turn
        turned = BlockArguments(turn(call.hidden), call.args, call.kwargs)
        # Online rotations act on the inputs of layers whose weights are rewritten already.
        online = {
            layer: part.modules[layer] for layer in plan.online if layer in part.modules
        }
        with input_hooks(
            online, lambda layer: _turning(self.rotation(plan.online[layer], plan))
        ):
            after = _part(name, block, turned, changed).run(turned.hidden)
        # A parameter of no known layer is the likely reason if the block computes something else.
        unknown = part.unknown()
        hint = ""
        if unknown:
            hint = (
                f"; {unknown[0]} belongs to no layer, perhaps it reads or writes the residual"
                " stream"
            )
        return plan, _checked(name, _error(turn(before), after), hint), before

    def _plan(self, part: ModelPart, hidden: torch.Tensor) -> WeightRewrites:
        readings = part.read(hidden)
        # Layers after a norm of the stream read it, and do not add to it.
        skipped = {reader for reading in readings for reader in reading.readers}
        writers = part.written(hidden, self._size, skipped, normed=not self.settings.r1)
        plan = WeightRewrites()
        if self.settings.r1:
            plan = fold_stream(part, StreamRole(readings, writers), self._size)
        all_heads = part.heads(hidden, writers)
        if self.settings.r2:
            for heads in all_heads:
                plan.update(fold_heads(part, heads))
        if self.settings.r4:
            matrices = dict(part.weighted())
            # Readers of heads have inputs that R2 may rotate; R4 is for the other writers (down
            # projections).
            readers = {heads.reader for heads in all_heads}
            for name in writers:
                if name not in readers:
                    plan.update(fold_online(part, name, matrices[name].shape[1]))
        return plan

    def rotation(self, name: str, plan: WeightRewrites) -> OrthogonalMatrix:
        """Return the rotation with a name."""
        if name not in self.rotations:
            size = plan.sizes[name]
            mixed = size
            # Heads are small, and always mixed as a whole.
            if self.settings.size and not name.startswith(HEADS):
                mixed = self.settings.size
            if size % mixed:
                raise ConfigError(
                    f"size of rotation is {mixed}, which does not divide {size}"
                    " channels",
                )
            # With a LayerNorm, the rotation must keep the vector of ones (see ``centered``); values
            # of heads and online rotations have no means to keep.
            create = balanced if name == STREAM and self.centered else random_hadamard
            rotation = create(mixed, self.settings.seed)
            self.rotations[name] = OrthogonalMatrix.of(rotation)
        return self.rotations[name]

    def _changed(
        self, plan: WeightRewrites, get: Callable[[str], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        # Rotations are made when they are first asked for, each from the same seed.
        for name in plan.sizes:
            self.rotation(name, plan)
        return {name: plan.tensor(name, get, self.rotations) for name in plan.rewrites}


def stream_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model by name.

    Raises:
        ModelError: the model has no blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise ModelError(
            "the model has no list of blocks; only language models are rotated",
        )
    return blocks


def apply(
    plan: WeightRewrites, model: nn.Module, rotations: Mapping[str, OrthogonalMatrix]
) -> None:
    """Rewrite the parameters of a model in place, and insert online rotations."""

    def get(name: str) -> torch.Tensor:
        return model.get_parameter(name).detach()

    # All new parameters first: a rewrite may read another parameter as it was (gains, biases).
    tensors = {name: plan.tensor(name, get, rotations) for name in plan.rewrites}
    for name, tensor in tensors.items():
        model.get_parameter(name).data = tensor
    layers = {
        name: OnlineRotation(model.get_submodule(name), rotations[rotation])
        for name, rotation in plan.online.items()
    }
    put_modules(model, layers)


def _part(
    name: str,
    block: nn.Module,
    call: BlockArguments,
    changed: Mapping[str, torch.Tensor] | None = None,
) -> ModelPart:
    """Return a block in float32, with shared parameters by their names in the model."""
    tensors = floats_of(block)
    # Shared parameters keep the names of the model: the prefix of the block is cut off.
    for key, tensor in (changed or {}).items():
        tensors[key.removeprefix(f"{name}.")] = tensor
    modules = dict(block.named_modules(prefix=name))

    def run(hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            output = _raw(block, tensors, call, hidden)
        written: torch.Tensor = (
            output if isinstance(output, torch.Tensor) else output[0]
        )
        return written

    return ModelPart(modules, run)


def _raw(
    block: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    call: BlockArguments,
    hidden: torch.Tensor,
) -> Any:
    args = (hidden, *call.args)
    return functional_call(block, dict(tensors), args, dict(call.kwargs))


def _error(wanted: torch.Tensor, output: torch.Tensor) -> float:
    return float((output - wanted).norm() / wanted.norm())


def _checked(name: str, error: float, hint: str = "") -> float:
    # Not `error > _TOLERANCE`: NaN must fail, too.
    if not error <= _TOLERANCE:
        raise ModelError(
            f"{name} computes something else when it is rotated (relative error"
            f" {error:.2g}){hint}; leave rotations out",
        )
    return error


def _turning(turning: OrthogonalMatrix) -> Callable[..., Any]:
    return lambda module, args, named: ((turning.turn(args[0]), *args[1:]), named)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x
