"""Gradient descent on trainable weights, with the best state seen so far.

Roundings swing about the middle between two codes, and the mean of the last steps tells on which
side they are (Nagel et al. 2022, "Overcoming Oscillations in Quantization-Aware Training"): running
means are looked at, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from quark_onnx.torch.algorithms.learned_rounding.trainable_weight import (
    TrainableWeight,
)

#: How a gradient becomes a step.
OPTIMIZERS = ("adam", "sign")
#: Steps that running means go back, about, and the greatest share of all steps. Over more steps
#: roundings wander together, each making good what others lose, and the means of many no longer fit
#: each other.
_MEMORY = 50
_SHARE = 0.05


class Descent:
    """Gradient descent on the roundings and ranges of weights.

    Args:
        weights: whose leaves move.
        steps: that it will take.
        lr: how far a rounding moves in the first step, as a share of the distance of two codes.
        range_lr: how far an end of a range moves, as a share of it, and accordingly less where it
            has more than 15 steps; None leaves ranges alone.
        optimizer: "adam", or "sign", whose steps all have the same length.

    Attributes:
        leaves: what moves.
        best: the least error that was seen.
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
        rates: list[tuple[float, list[Any]]] = [(lr, [each.shift for each in weights])]
        if range_lr is not None:
            rates += [(range_lr * each.fineness, each.leaves()[1:]) for each in weights]
        self._rates = [rate for rate, _ in rates]
        self.leaves = [leaf for _, part in rates for leaf in part]
        groups = [{"params": part} for _, part in rates]
        # steps of Adam hardly depend on how large the error is; gradients of a good block are tiny
        self._optimizer: Any = (
            torch.optim.SGD(groups, lr)
            if self._sign
            else torch.optim.Adam(groups, betas=(0.9, 0.99), eps=1e-20)
        )
        self.best = float("inf")
        self._kept: list[Any] = [leaf.detach().clone() for leaf in self.leaves]
        self._means: list[Any] = [leaf.detach().clone() for leaf in self.leaves]
        self._share = 1 / max(1, min(_MEMORY, round(_SHARE * steps)))

    def step(self, share: float) -> None:
        """Update the leaves along their gradients; ``share`` scales the first learning rates."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        if self._sign:
            for leaf in self.leaves:
                leaf.grad.sign_()
        self._optimizer.step()
        for each in self._weights:
            each.hold()
        for mean, leaf in zip(self._means, self.leaves, strict=True):
            mean.lerp_(leaf.detach(), self._share)

    def look(self, error: Callable[[], float]) -> float:
        """Return the error of the present state, and keep a state with the least error."""
        found = error()
        if found < self.best:
            self.best = found
            self._kept = [leaf.detach().clone() for leaf in self.leaves]
        return found

    def look_at_means(self, error: Callable[[], float]) -> float:
        """Return the error of the running mean of the leaves, and keep it if least."""
        self._swap()
        try:
            return self.look(error)
        finally:
            self._swap()

    def _swap(self) -> None:
        """Swap the leaves and their running means."""
        with torch.no_grad():
            for mean, leaf in zip(self._means, self.leaves, strict=True):
                own = leaf.clone()
                leaf.copy_(mean)
                mean.copy_(own)

    def state(self) -> dict[str, Any]:
        """Return the present and the best state as tensors by name."""
        found = {"best": torch.tensor(self.best, dtype=torch.float64)}
        found |= {f"leaf.{place}": leaf for place, leaf in enumerate(self.leaves)}
        found |= {f"kept.{place}": leaf for place, leaf in enumerate(self._kept)}
        found |= {f"mean.{place}": leaf for place, leaf in enumerate(self._means)}
        own = self._optimizer.state_dict()["state"]
        return found | {
            f"{name}.{place}": each
            for place, part in own.items()
            for name, each in part.items()
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state has the moments that Adam needs after the first step."""
        kinds = ("leaf", "kept", "mean", "step", "exp_avg", "exp_avg_sq")
        wanted = {"best"} | {
            f"{kind}.{place}" for kind in kinds for place in range(len(self.leaves))
        }
        return wanted <= state.keys()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        parts = dict[str, dict[int, Any]]()
        for name, tensor in state.items():
            kind, _, place = name.partition(".")
            parts.setdefault(kind, {})[int(place or 0)] = tensor
        self.best = float(parts.pop("best")[0])
        for name, leaves in (
            ("leaf", self.leaves),
            ("kept", self._kept),
            ("mean", self._means),
        ):
            with torch.no_grad():
                for index, tensor in parts.pop(name).items():
                    leaves[index].copy_(tensor)
        own = self._optimizer.state_dict()
        places = range(len(self.leaves) if parts else 0)
        own["state"] = {
            place: {name: part[place] for name, part in parts.items()}
            for place in places
        }
        self._optimizer.load_state_dict(own)

    def finish(self) -> float:
        """Restore the best state, and return its error."""
        with torch.no_grad():
            for leaf, value in zip(self.leaves, self._kept, strict=True):
                leaf.copy_(value)
        return self.best


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
        count: of samples.
        batch: samples to a step.
        seed: of the orders.

    >>> found = draws(4, 3, seed=0)
    >>> sorted(next(found) + next(found)[:1])
    [0, 1, 2, 3]
    """
    generator = torch.Generator().manual_seed(seed)
    order = list[int]()
    while True:
        while len(order) < min(batch, count):
            order += torch.randperm(count, generator=generator).tolist()
        yield order[:batch]
        del order[:batch]
