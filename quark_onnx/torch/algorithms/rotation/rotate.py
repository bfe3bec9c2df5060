"""Rotate a language model, in memory or file by file; its function is unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.torch.algorithms.rotation.planner import Rotator, apply, stream_blocks
from quark_onnx.torch.algorithms.rotation.settings import Rotation
from quark_onnx.torch.algorithms.rotation.spinquant import (
    RotationTraining,
    Trainee,
    learn,
)
from quark_onnx.torch.algorithms.rotation.weight_rewrites import WeightRewrites
from quark_onnx.torch.calibration.block_stream import batches, inference
from quark_onnx.torch.checkpoints.parameter_sources import (
    Sources,
    empty,
    fill,
    missing_of,
    tie,
)
from quark_onnx.torch.models.experts import unfuse_experts
from quark_onnx.torch.models.names import outside_of
from quark_onnx.torch.models.online_rotation import OrthogonalMatrix
from quark_onnx.torch.models.quantized_layer import Layers
from quark_onnx.torch.models.structure import embedding_of, head_of, vocabulary_of

#: Tokens of the sample.
_TOKENS = 32


@dataclass(frozen=True)
class Rotated:
    """The result of a rotation.

    Attributes:
        rewritten: number of rewritten parameters.
        heads: names of the layers whose outputs are values of attention heads, which are rotated.
        online: names of the layers whose inputs each run rotates.
        error: the greatest relative error of a part of the model, in float32.
        untied: whether the head had the weight of the embedding of tokens, and has its own now.
        learned: the loss of the quantized model before and after its rotations were learned; None
            if they were not.
        settings: the settings of the rotation.
    """

    rewritten: int
    heads: tuple[str, ...]
    online: tuple[str, ...]
    error: float
    untied: bool
    learned: tuple[float, float] | None
    settings: Rotation

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes for the user."""
        notes = []
        if self.settings.r2 and not self.heads:
            notes.append(
                "no values of attention heads are rotated: attention does something"
                " else with them than to weigh them, or does not say how large a head"
                " is (head_dim)",
            )
        if self.online:
            notes.append(
                f"each run rotates what {len(self.online)} layers read; such a model"
                " has no checkpoint",
            )
        if self.learned:
            before, after = self.learned
            notes.append(
                "rotations were learned: the loss of the quantized model was"
                f" {before:.4f}, and is {after:.4f}"
            )
        return tuple(notes)

    def renamed(self, layers: Layers) -> dict[str, Any]:
        """Rename layers to their present names; a layer after an online rotation has a new name."""
        return {
            f"{name}.layer" if name in self.online else name: entry
            for name, entry in layers.items()
        }


@dataclass(frozen=True)
class _Planned:
    """The rewrites of each part of a model, and the greatest relative error."""

    parts: tuple[WeightRewrites, ...]
    error: float

    @property
    def rewrites(self) -> WeightRewrites:
        rewrites = WeightRewrites()
        for part in self.parts:
            rewrites.update(part)
        return rewrites

    def rotated(
        self,
        settings: Rotation,
        untied: bool,
        learned: tuple[float, float] | None = None,
    ) -> Rotated:
        """Return the result once all rewrites are applied."""
        rewrites = self.rewrites
        return Rotated(
            len(rewrites.rewrites),
            rewrites.heads,
            tuple(rewrites.online),
            self.error,
            untied,
            learned,
            settings,
        )


def rotate(
    model: nn.Module,
    settings: Rotation,
    data: Iterable[Any] | None = None,
    layers: Layers | None = None,
    *,
    progress: bool | None = None,
) -> Rotated:
    """Rotate a float model in place; a model that cannot be rotated keeps its weights.

    Stacks of experts are taken apart, and a head that shares its weight with the embedding of
    tokens gets its own.

    Args:
        model: a language model of transformers.
        settings: the rotations.
        data: batches; the start of the first is the sample. Random tokens if None.
        layers: the layers to quantize; learned rotations need them, and the data.
        progress: whether to show a progress bar while rotations are learned; None shows it if
            stderr is a terminal.

    Raises:
        DataError: rotations are learned, and the data or the layers are missing.
        ModelError: the model cannot be rotated: its norms come after its layers, or a part of it
            computes something else when it is rotated.
    """
    # Read once: the data may be an iterator, and both the sample and the training need it.
    samples = [] if data is None else list(batches(data))
    if settings.trained and not (samples and layers):
        raise DataError(
            "rotations are learned from data, for layers that are quantized; give both,"
            " or trained=False",
        )
    # Rotations rewrite weights of layers, and experts are layers only after unfusing.
    unfuse_experts(model)
    with _untied(model, settings) as untied, inference(model):
        sample = _short(samples[0]) if samples else _sample(model)
        rotator = Rotator(model, settings, sample)
        # All weights are in memory: no block has to be loaded.
        planned = _planned(rotator, lambda name: contextlib.nullcontext())
        learned = None
        if settings.trained:
            fixed, starts = _starts(rotator, planned.rewrites)
            how = RotationTraining(
                settings.steps,
                seed=settings.seed,
                centered=rotator.centered,
                progress=progress,
            )
            trainee = Trainee(model, planned.rewrites, layers or {}, fixed)
            best = learn(trainee, starts, samples, how)
            # Learned matrices have no Hadamard factors: each is a single dense one.
            for name, matrix in best.matrices.items():
                rotator.rotations[name] = OrthogonalMatrix((matrix,))
            learned = (best.before, best.after)
        # Parameters change only here, after every part has passed its check.
        for part in planned.parts:
            apply(part, model, rotator.rotations)
    return planned.rotated(settings, untied, learned)


def rotate_sources(model: nn.Module, sources: Sources, settings: Rotation) -> Rotated:
    """Rotate the tensors of a checkpoint as they are read.

    All tensors are read once, a block of the model at a time, to check the result.

    Args:
        model: the model with empty parameters, which stay empty. Afterwards, the head has a weight
            of its own.
        sources: the sources of the tensors.
        settings: the rotations.

    Raises:
        ConfigError: the settings ask for R4, or for learned rotations.
        ModelError: the model cannot be rotated, or a tensor is missing.
    """
    if settings.r4:
        raise ConfigError(
            "a checkpoint has no place for r4 of rotation; set it to false"
        )
    if settings.trained:
        raise ConfigError(
            "rotations are learned in memory: load the model, call quantize_model, and"
            " export it",
        )
    blocks = stream_blocks(model)

    @contextlib.contextmanager
    def filled(name: str) -> Iterator[None]:
        block = blocks[name]
        # The weights of one block at a time are in memory.
        fill(block, name, sources)
        if missing := missing_of(block):
            raise sources.missing(f"{name}.{missing[0]}")
        yield
        empty(block)

    with _untied(model, settings) as untied, inference(model):
        modules = outside_of(dict(model.named_modules()), blocks)
        # Modules without children hold the parameters themselves.
        outside = {
            name: module
            for name, module in modules.items()
            if not list(module.children())
        }
        for name, module in outside.items():
            fill(module, name, sources)
        # The hidden states that the first block reads, and whether norms subtract means, are known
        # only with the weights of the first block.
        with filled(next(iter(blocks))):
            rotator = Rotator(model, settings, _sample(model))
        planned = _planned(rotator, filled)
        for module in outside.values():
            empty(module)
    rewrites = planned.rewrites
    rotations = rotator.rotations
    # Tensors are rewritten when they are read, one at a time.
    sources.change(
        rewrites.rewrites, lambda name, get: rewrites.tensor(name, get, rotations)
    )
    tie(model, sources.tied)
    return planned.rotated(settings, untied)


def _planned(
    rotator: Rotator, at: Callable[[str], AbstractContextManager[None]]
) -> _Planned:
    """Plan all parts; ``at`` loads the weights of a block for its context."""
    outside, worst = rotator.outside()
    parts = [outside]
    hidden = rotator.hidden
    for name in rotator.blocks:
        # The output of the float block is the input of the next one.
        with at(name):
            plan, error, hidden = rotator.block(name, hidden)
        parts.append(plan)
        worst = max(worst, error)
    return _Planned(tuple(parts), worst)


def _starts(
    rotator: Rotator, plan: WeightRewrites
) -> tuple[dict[str, OrthogonalMatrix], tuple[dict[str, torch.Tensor], ...]]:
    """Return the online rotations, which are not learned, and the starts of learning."""
    fixed = {
        name: rotator.rotations[name]
        for name in plan.online.values()
        if name in rotator.rotations
    }
    identities = {
        name: torch.eye(size, dtype=torch.float64)
        for name, size in plan.sizes.items()
        if name not in fixed
    }
    turned = {
        name: rotator.rotations[name].turn(identity)
        for name, identity in identities.items()
    }
    # Random rotations, and no rotation: learning starts from the better of both.
    return fixed, (turned, identities)


@contextlib.contextmanager
def _untied(model: Any, settings: Rotation) -> Iterator[bool]:
    """Give the head a weight of its own if it shares the embedding's."""
    head: Any = head_of(model)
    table: Any = embedding_of(model)
    present = head is not None and table is not None
    if not (settings.r1 and present and head.weight is table.weight):
        yield False
        return
    # The last norm's gain is folded into the head alone; the embedding must not be scaled by it.
    head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
    _set_tied(model, False)
    try:
        yield True
    except BaseException:
        head.weight = table.weight
        _set_tied(model, True)
        raise


def _set_tied(model: Any, tied: bool) -> None:
    """Record in a model's configuration whether the head shares the embedding's weight."""
    # A multimodal model has the entry twice, in its own and in its language model's configuration;
    # transformers ties the weights again on loading if either says so.
    text_config = model.config.get_text_config()
    model.config.tie_word_embeddings = tied
    text_config.tie_word_embeddings = tied


def _sample(model: nn.Module) -> torch.Tensor:
    size = vocabulary_of(model)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, size, (1, _TOKENS), generator=generator)


def _short(batch: Any) -> Any:
    """Return the first tokens of the first sample, with masks of that shape."""
    if isinstance(batch, torch.Tensor):
        # (samples, tokens) of ids; other tensors may not be cut.
        if batch.ndim == 2 and not batch.is_floating_point():
            return batch[:1, :_TOKENS]
        return batch
    if isinstance(batch, Mapping) and all(
        isinstance(tensor, torch.Tensor) and tensor.ndim == 2
        for tensor in batch.values()
    ):
        return {name: tensor[:1, :_TOKENS] for name, tensor in batch.items()}
    return batch
