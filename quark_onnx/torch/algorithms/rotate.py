"""rotate: a language model in memory becomes one that computes the same and is easier to round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quark_onnx.errors import DataError, QuarkError
from quark_onnx.torch.algorithms.base import Layers
from quark_onnx.torch.algorithms.rewrites import Plan
from quark_onnx.torch.algorithms.rotation import Rotation
from quark_onnx.torch.algorithms.rotator import Rotator, apply
from quark_onnx.torch.algorithms.spinquant import Trainee, Training, learn
from quark_onnx.torch.algorithms.turning import Turning
from quark_onnx.torch.experts import unfuse_experts
from quark_onnx.torch.walk import batches, inference

#: Tokens of the sample.
_TOKENS = 32


@dataclass(frozen=True)
class Rotated:
    """What became of a model.

    Attributes:
        rewritten: how many parameters.
        heads: names of the layers whose outputs are values of attention heads, which are rotated.
        online: names of the layers that read what each run rotates.
        error: how far the worst part of the model is from what it was, relative, in float32.
        learned: the loss of the quantized model before and after its rotations were learned; None if they were not.
    """

    rewritten: int
    heads: tuple[str, ...]
    online: tuple[str, ...]
    error: float
    learned: tuple[float, float] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know."""
        online = f"each run rotates what {len(self.online)} layers read; such a model has no checkpoint"
        return (online,) if self.online else ()


def rotate(model: Any, settings: Rotation, data: Iterable[Any] | None = None, layers: Layers | None = None) -> Rotated:
    """Rotate a float model in place, or leave its weights as they are if it cannot be rotated.

    Stacks of experts are taken apart, and a head that shares its weight with the embedding of tokens gets its own.

    Args:
        model: a language model of transformers.
        settings: what is rotated.
        data: batches; the start of the first is a sample. Random tokens if None.
        layers: what will be quantized; learned rotations need it, and the data.

    Raises:
        DataError: rotations are learned, and the data or the layers are missing.
        ModelError: the model cannot be rotated: its norms stand behind its layers, or a part of it computes something
            else when it is rotated.
    """
    found = [] if data is None else list(batches(data))
    if settings.trained and not (found and layers):
        raise DataError("rotations are learned from data, for layers that are quantized; give both, or trained=False")
    unfuse_experts(model)
    tied = settings.r1 and untie(model)
    try:
        with inference(model):
            return _rotated(model, settings, found, layers or {})
    except QuarkError:
        if tied:
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
            _set_tied(model, True)
        raise


def _rotated(model: Any, settings: Rotation, data: list[Any], layers: Layers) -> Rotated:
    rotator = Rotator(model, settings, _short(data[0]) if data else _sample(model))
    first, worst = rotator.outside()
    plans, hidden = [first], rotator.hidden
    for name in rotator.blocks:
        plan, error, hidden = rotator.block(name, hidden)
        plans.append(plan)
        worst = max(worst, error)
    whole = Plan()
    for plan in plans:
        whole.update(plan)
    learned = _learn(model, settings, rotator, whole, (data, layers)) if settings.trained else None
    for plan in plans:
        apply(plan, model, rotator.rotations)
    return Rotated(len(whole.rewrites), whole.heads, tuple(whole.online), worst, learned)


def _learn(
    model: Any, settings: Rotation, rotator: Rotator, plan: Plan, given: tuple[list[Any], Layers]
) -> tuple[float, float]:
    """Put learned rotations in the place of those that are folded into weights."""
    data, layers = given
    folded = {name: each for name, each in rotator.rotations.items() if name not in plan.online.values()}
    fixed = {name: each for name, each in rotator.rotations.items() if name not in folded}
    ones = {name: torch.eye(plan.sizes[name], dtype=torch.float64) for name in folded}
    start = {name: each.turn(ones[name]) for name, each in folded.items()}
    trainee = Trainee(model, plan, layers, fixed)
    found = learn(trainee, (start, ones), data, Training(settings.steps, seed=settings.seed, centered=rotator.centered))
    rotator.rotations |= {name: Turning((matrix,)) for name, matrix in found.matrices.items()}
    return found.before, found.after


def untie(model: Any) -> bool:
    """Give the head a weight of its own, where it has that of the embedding of tokens; whether it had."""
    sides = (getattr(model, f"get_{side}_embeddings", None) for side in ("output", "input"))
    head, table = (None if side is None else side() for side in sides)
    if head is None or table is None or head.weight is not table.weight:
        return False
    head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
    _set_tied(model, False)
    return True


def _set_tied(model: Any, tied: bool) -> None:
    """Say in the configuration of a model whether the head has the weight of the embedding of tokens."""
    for config in {id(each): each for each in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = tied


def _sample(model: Any) -> Any:
    size = model.get_input_embeddings().weight.shape[0]
    return torch.randint(0, size, (1, _TOKENS), generator=torch.Generator().manual_seed(0))


def _short(batch: Any) -> Any:
    """The first tokens of the first sample, where a batch is token ids, and masks of their shape."""
    if isinstance(batch, torch.Tensor):
        return batch[:1, :_TOKENS] if batch.ndim == 2 else batch
    if isinstance(batch, Mapping) and all(isinstance(each, torch.Tensor) and each.ndim == 2 for each in batch.values()):
        return {key: each[:1, :_TOKENS] for key, each in batch.items()}
    return batch
