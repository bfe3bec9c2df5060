"""Rewrites of the parameters of a rotated model as functions of the float parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from quark_onnx.kernels.axes import along
from quark_onnx.torch.algorithms.rotation.residual_stream import (
    Heads,
    ModelPart,
    Reading,
    StreamRole,
    is_table,
)
from quark_onnx.torch.models.online_rotation import OrthogonalMatrix
from quark_onnx.torch.models.quantized_layer import kind_of

#: The rotation of the residual stream.
STREAM = "stream"
#: Prefix of the names of rotations of the values of attention heads.
HEADS = "heads of "


@dataclass(frozen=True)
class Turn:
    """A rotation of a parameter along an axis.

    Attributes:
        axis: axis of the parameter.
        rotation: name of the rotation.
        starts: first channels of the parts that are rotated; None for the whole axis, part by part.
    """

    axis: int
    rotation: str
    starts: tuple[int, ...] | None = None

    def __call__(self, x: torch.Tensor, turning: OrthogonalMatrix) -> torch.Tensor:
        """Return the rotated parameter."""
        if self.starts is None:
            return turning.turn(x, self.axis)
        # (heads, size): the channels of each head along the axis.
        channels = torch.tensor(self.starts)[:, None] + torch.arange(turning.size)
        channels = channels.flatten().to(x.device)
        turned = turning.turn(x.index_select(self.axis, channels), self.axis)
        return x.index_copy(self.axis, channels, turned)


@dataclass(frozen=True)
class Gain:
    """The gain of a norm: its weight, where ``neutral`` means a gain of 1.

    Attributes:
        weight: the name of the parameter.
        neutral: 1, or 0 where the norm multiplies by 1 + weight.
        axis: axis of the parameter that the gain is folded into.
        inverse: whether the parameter is divided by the gain instead.
    """

    weight: str
    neutral: float
    axis: int
    inverse: bool = False

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the parameter times the gain."""
        # Gemma's norms multiply by 1 + weight, and have neutral 0.
        gain = weight + (1 - self.neutral)
        gain = gain.reshape(along(self.axis, x.ndim))
        # A gain of 0 silences a channel, and 0 / 0 would be NaN.
        if self.inverse:
            return torch.where(x == 0, x, x / gain)
        return x * gain


@dataclass(frozen=True)
class Rewrite:
    """The steps that rewrite a parameter, in order.

    Attributes:
        fill: a constant in place of the parameter; None keeps the parameter.
        product: names of a weight and of a vector whose product is added, and the axis of the
            weight that is summed up.
        gain: the gain of a norm.
        turns: the rotations.
    """

    fill: float | None = None
    product: tuple[str, str, int] | None = None
    gain: Gain | None = None
    turns: tuple[Turn, ...] = ()

    def __call__(
        self,
        x: torch.Tensor,
        get: Callable[[str], torch.Tensor],
        rotations: Mapping[str, OrthogonalMatrix],
    ) -> torch.Tensor:
        """Return the new parameter, in the type of ``x``.

        Args:
            x: the float model's parameter.
            get: the other parameters of the float model, by name.
            rotations: the rotations, by name.
        """
        # A constant needs no other step.
        if self.fill is not None:
            return torch.full_like(x, self.fill)
        if self.product is not None:
            weight, vector, axis = self.product
            # W b, of shape (outputs,): the bias of a norm passes through the reader's weight.
            x = x + torch.tensordot(get(weight).to(x), get(vector).to(x), ([axis], [0]))
        if self.gain is not None:
            x = self.gain(x, get(self.gain.weight).to(x))
        for turn in self.turns:
            x = turn(x, rotations[turn.rotation])
        return x


@dataclass
class WeightRewrites:
    """The rewrites of a model, or of a part of a model.

    Attributes:
        rewrites: rewrites of parameters, by name; all others stay.
        online: names of the online rotations, by the layer whose input is rotated.
        sizes: sizes of the rotations, by name.
    """

    rewrites: dict[str, Rewrite] = field(default_factory=dict)
    online: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def update(self, other: WeightRewrites) -> None:
        """Add the rewrites of another part."""
        # A parameter may belong to two parts, as a layer may write to the stream and read heads.
        for name, rewrite in other.rewrites.items():
            steps = vars(rewrite).items()
            self.add(
                name, **{step: value for step, value in steps if value is not None}
            )
        self.online |= other.online
        self.sizes |= other.sizes

    @property
    def heads(self) -> tuple[str, ...]:
        """Return the layers whose outputs are values of attention heads."""
        return tuple(
            name.removeprefix(HEADS) for name in self.sizes if name.startswith(HEADS)
        )

    def tensor(
        self,
        name: str,
        get: Callable[[str], torch.Tensor],
        rotations: Mapping[str, OrthogonalMatrix],
    ) -> torch.Tensor:
        """Return a parameter of the rotated model, computed in float64, in its type in the model.

        Args:
            name: name of the parameter.
            get: the parameters of the float model, by name.
            rotations: the rotations, by name.
        """
        x = get(name)
        if name not in self.rewrites:
            return x
        # One rounding to the stored type, at the end: bfloat16 would round after each step.
        return self.rewrites[name](x.double(), get, rotations).to(x.dtype)

    def add(self, name: str, **changes: Any) -> None:
        """Add steps to the rewrite of a parameter."""
        now = self.rewrites.get(name, Rewrite())
        # Rotations add up, in order; other steps are given once.
        turns = (*now.turns, *changes.pop("turns", ()))
        self.rewrites[name] = replace(now, turns=turns, **changes)


def fold_stream(part: ModelPart, stream: StreamRole, size: int) -> WeightRewrites:
    """Return the rotation of the stream, with gains and biases of norms folded into readers."""
    plan = WeightRewrites(sizes={STREAM: size})
    for reading in stream.readings:
        gain = _fold_norm(plan, part, reading)
        for name in reading.readers:
            axis = inputs_of(part.modules[name])
            plan.add(
                f"{name}.weight",
                gain=None if gain is None else replace(gain, axis=axis),
                turns=(Turn(axis, STREAM),),
            )
    # Outputs of writers, and thereby their biases, become rotated.
    for name in stream.writers:
        axis = outputs_of(part.modules[name])
        plan.add(f"{name}.weight", turns=(Turn(axis, STREAM),))
        if _has_bias(part.modules[name]):
            plan.add(f"{name}.bias", turns=(Turn(0, STREAM),))
    return plan


def _fold_norm(plan: WeightRewrites, part: ModelPart, reading: Reading) -> Gain | None:
    """Neutralize a norm, and return the gain.

    The bias of the norm is added to the biases of the readers, or stays, rotated, if a reader has
    no bias.
    """
    if reading.norm is None:
        return None
    norm = part.modules[reading.norm]
    gain = None
    # The norm keeps only its normalization, which a rotation does not change.
    if reading.neutral is not None:
        plan.add(f"{reading.norm}.weight", fill=reading.neutral)
        gain = Gain(f"{reading.norm}.weight", reading.neutral, axis=0)
    if _has_bias(norm):
        bias = f"{reading.norm}.bias"
        # W (g x + b) = (W g) x + W b: the constant part fits into the bias of a linear reader.
        if all(_has_bias(part.modules[name]) for name in reading.readers):
            plan.add(bias, fill=0.0)
            for name in reading.readers:
                axis = inputs_of(part.modules[name])
                plan.add(f"{name}.bias", product=(f"{name}.weight", bias, axis))
        else:
            # The gain moves into the readers, so that the bias is divided by it to stay the same.
            inverse = None if gain is None else replace(gain, inverse=True)
            plan.add(bias, gain=inverse, turns=(Turn(0, STREAM),))
    return gain


def fold_heads(part: ModelPart, heads: Heads) -> WeightRewrites:
    """Return the rotation of the values of attention heads."""
    rotation = HEADS + heads.source
    plan = WeightRewrites(sizes={rotation: heads.size})
    source = part.modules[heads.source]
    # Only the channels of values are rotated; a fused projection has queries and keys, too.
    turn = Turn(outputs_of(source), rotation, heads.starts)
    plan.add(f"{heads.source}.weight", turns=(turn,))
    if _has_bias(source):
        plan.add(f"{heads.source}.bias", turns=(Turn(0, rotation, heads.starts),))
    turn = Turn(inputs_of(part.modules[heads.reader]), rotation)
    plan.add(f"{heads.reader}.weight", turns=(turn,))
    return plan


def fold_online(part: ModelPart, name: str, size: int) -> WeightRewrites:
    """Return the online rotation of a layer's input."""
    # Layers of equal width share a rotation.
    rotation = f"online {size}"
    axis = inputs_of(part.modules[name])
    return WeightRewrites(
        {f"{name}.weight": Rewrite(turns=(Turn(axis, rotation),))},
        {name: rotation},
        {rotation: size},
    )


def inputs_of(module: nn.Module) -> int:
    """Return the input axis of a module's weight."""
    return 0 if kind_of(module) == "Conv1D" else 1


def outputs_of(module: nn.Module) -> int:
    """Return the output axis of a module's weight."""
    # (tokens, features) of an embedding.
    if is_table(module):
        return 1
    return 1 - inputs_of(module)


def _has_bias(module: nn.Module) -> bool:
    return getattr(module, "bias", None) is not None
