"""Gradient descent on trainable weights, with the best state seen so far.

Roundings oscillate around the middle between two codes, and the mean of the last steps tells the
better side (Nagel et al. 2022, "Overcoming Oscillations in Quantization-Aware Training"). Running
means are therefore evaluated, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch

from quark_onnx.torch.algorithms.learned_rounding.trainable_weight import (
    TrainableWeight,
)

#: Optimizers of a descent.
OPTIMIZERS = ("adam", "sign")
#: The time constant of running means in steps. Roundings drift together over more steps, each
#: compensating others, and the means of many no longer fit each other.
_MEMORY = 50
#: The greatest time constant as a share of all steps.
_SHARE = 0.05


class Descent:
    """Gradient descent on the roundings and ranges of weights.

    Args:
        weights: the weights in training.
        steps: the number of steps.
        lr: the learning rate of roundings in the first step, in distances of codes.
        range_lr: the learning rate of the ends of ranges, relative to the range, and less for
            ranges of more than 15 steps; None keeps ranges.
        optimizer: "adam", or "sign" for steps of equal length.

    Attributes:
        leaves: the trained tensors.
        best: the least error so far.
    """

    def __init__(
        self,
        weights: Sequence[TrainableWeight],
        steps: int,
        lr: float,
        range_lr: float | None,
        optimizer: str = "adam",
    ) -> None:
        self._weights = weights
        self._sign = optimizer == "sign"
        self._rates = [lr]
        # One parameter group for all shifts, and one for the ranges of each weight, whose rates
        # differ.
        groups: list[list[torch.Tensor]] = [[weight.shift for weight in weights]]
        if range_lr is not None:
            for weight in weights:
                self._rates.append(range_lr * weight.fineness)
                groups.append(weight.leaves()[1:])
        self.leaves = [leaf for group in groups for leaf in group]
        parameters = [{"params": group} for group in groups]
        # Adam divides by the gradient's magnitude; the gradients of a good block are tiny, compared
        # with the default eps of 1e-8
        self._optimizer: Any
        if self._sign:
            self._optimizer = torch.optim.SGD(parameters, lr)
        else:
            self._optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.99), eps=1e-20)
        self.best = float("inf")
        # The start: the best state until a look finds another one.
        self._kept = _copied(self.leaves)
        self._means = _copied(self.leaves)
        # The share of a new state in the running mean: 1 / time constant.
        self._share = 1 / max(1, min(_MEMORY, round(_SHARE * steps)))

    def step(self, share: float) -> None:
        """Update the leaves along their gradients; ``share`` scales the first learning rates."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        # Signed gradient descent is SGD on the signs.
        if self._sign:
            for leaf in self.leaves:
                assert leaf.grad is not None
                leaf.grad.sign_()
        self._optimizer.step()
        # Into the allowed ranges before the mean is taken.
        for weight in self._weights:
            weight.hold()
        for mean, leaf in zip(self._means, self.leaves, strict=True):
            mean.lerp_(leaf.detach(), self._share)

    def look(self, error: Callable[[], float]) -> float:
        """Return the error of the present state, and keep a state with the least error."""
        value = error()
        if value < self.best:
            self.best = value
            self._kept = _copied(self.leaves)
        return value

    def look_at_means(self, error: Callable[[], float]) -> float:
        """Return the error of the running mean of the leaves, and keep it if least."""
        # The means take the place of the leaves while the error is computed.
        self._swap()
        try:
            return self.look(error)
        finally:
            self._swap()

    def _swap(self) -> None:
        """Swap the leaves and their running means."""
        with torch.no_grad():
            for mean, leaf in zip(self._means, self.leaves, strict=True):
                copy = leaf.clone()
                leaf.copy_(mean)
                mean.copy_(copy)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the present and the best state as tensors by name."""
        state = {"best": torch.tensor(self.best, dtype=torch.float64)}
        for kind, leaves in self._stored().items():
            for index, leaf in enumerate(leaves):
                # Names such as "leaf.3", "exp_avg.3": a flat mapping is what a file of tensors
                # holds.
                state[f"{kind}.{index}"] = leaf
        for index, moments in self._optimizer.state_dict()["state"].items():
            for name, moment in moments.items():
                state[f"{name}.{index}"] = moment
        return state

    def _stored(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors of a state, apart from the optimizer's moments, by kind."""
        return {"leaf": self.leaves, "kept": self._kept, "mean": self._means}

    def fits(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Return whether a state has the moments that Adam needs after the first step."""
        kinds = ("leaf", "kept", "mean", "step", "exp_avg", "exp_avg_sq")
        indices = range(len(self.leaves))
        names = (f"{kind}.{index}" for kind, index in product(kinds, indices))
        return state.keys() >= {"best", *names}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a state."""
        by_kind = dict[str, dict[int, Any]]()
        for name, tensor in state.items():
            kind, _, number = name.partition(".")
            # "best" has no number.
            by_kind.setdefault(kind, {})[int(number or 0)] = tensor
        self.best = float(by_kind.pop("best")[0])
        for kind, leaves in self._stored().items():
            with torch.no_grad():
                for index, tensor in by_kind.pop(kind).items():
                    leaves[index].copy_(tensor)
        optimizer_state = self._optimizer.state_dict()
        moments = dict[int, dict[str, Any]]()
        # Without moments, as before the first step, no leaf has an entry.
        for name, by_leaf in by_kind.items():
            for index in range(len(self.leaves)):
                moments.setdefault(index, {})[name] = by_leaf[index]
        optimizer_state["state"] = moments
        self._optimizer.load_state_dict(optimizer_state)

    def finish(self) -> float:
        """Restore the best state, and return its error."""
        with torch.no_grad():
            # In place: the trained weights hold these very tensors.
            for leaf, value in zip(self.leaves, self._kept, strict=True):
                leaf.copy_(value)
        return self.best


def _copied(leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of trained tensors that further steps leave unchanged."""
    return [leaf.detach().clone() for leaf in leaves]


def looks(steps: int, count: int) -> Iterator[int]:
    """Return the steps after which a descent is evaluated: the last, and evenly spread ones.

    >>> list(looks(59, 20))[-3:]
    [54, 57, 59]
    """
    every = -(-steps // count)
    yield from (*range(every, steps, every), steps)


def draws(count: int, batch: int, seed: int) -> Iterator[list[int]]:
    """Yield the samples of each step without end, in one shuffled order after another.

    Args:
        count: the number of samples.
        batch: samples per step.
        seed: the seed of the orders.

    >>> batches = draws(4, 3, seed=0)
    >>> sorted(next(batches) + next(batches)[:1])
    [0, 1, 2, 3]
    """
    generator = torch.Generator().manual_seed(seed)
    order = list[int]()
    while True:
        while len(order) < min(batch, count):
            # Another shuffled order as soon as the last one runs short.
            order += torch.randperm(count, generator=generator).tolist()
        yield order[:batch]
        del order[:batch]
