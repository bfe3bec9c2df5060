"""SignedRounding: roundings and ranges of a block, trained together by signed gradient descent.

Cheng et al. 2023, "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from quark_onnx.optimizers.base import require_flag, require_number, require_whole
from quark_onnx.errors import ConfigError
from quark_onnx.torch.algorithms.base import BlockJob, Outcome
from quark_onnx.torch.algorithms.trainable import TrainableWeight, can_train, through
from quark_onnx.torch.layers import QuantizedLayer, outputs_first
from quark_onnx.torch.quantized import Quantized


class Training(nn.Module):
    """A quantized layer that computes with a weight that is being trained; roundings hand gradients through.

    Args:
        layer: how it computes.
        weight: None where the codes of the layer stay.
    """

    def __init__(self, layer: QuantizedLayer, weight: TrainableWeight | None) -> None:
        super().__init__()
        self.layer, self.trained = layer, weight
        self.fixed = layer.weight if weight is None else None
        self.weight: Any = self.fixed

    def renew(self) -> None:
        """Compute the weight anew, once for all calls of a step."""
        if self.trained is not None:
            self.weight = outputs_first(self.trained.weight(), self.layer.kind)

    def forward(self, input: Any, *more: Any, **named: Any) -> Any:
        """What the quantized layer computes."""
        layer = self.layer
        if layer.input is not None and layer.kind not in ("Embedding", "EmbeddingBag"):
            input = through(input, layer.input(input.detach()))
        found = layer.compute(input, self.weight, more, named)
        return found if layer.output is None else through(found, layer.output(found.detach()))


@dataclass(frozen=True)
class SignedRounding:
    name: ClassVar[str] = "autoround"
    stage: ClassVar[str] = "weights"
    needs_data: ClassVar[bool] = True

    steps: int = 200
    lr: float | None = None
    minmax_lr: float | None = None
    batch: int = 8
    tune_ranges: bool = True
    seed: int = 0
    evaluate: int = 20
    adam: bool = False

    def __call__(self, job: BlockJob, made: Mapping[str, Quantized]) -> tuple[dict[str, Quantized], list[Outcome]]:
        found = dict(made)
        trained = {
            name: TrainableWeight(weight, made[name]) for name, weight, spec in job.weights() if can_train(spec.weight)
        }
        layers = {
            name: Training(layer, trained.get(name)) for name, layer in job.quantized(made).items()
        }
        with job.put(layers):
            before, after = self._train(job.block, list(layers.values()), trained, job)
        found |= {name: each.made() for name, each in trained.items()}
        return found, [Outcome(job.name, self.name, before, after)]

    def _train(self, block, layers, trained, job) -> tuple[float, float]:
        leaves = [(leaf, self._lr(of_scale)) for each in trained.values() for leaf, of_scale in each.leaves(self.tune_ranges)]
        only = [leaf for leaf, _ in leaves]
        generator = torch.Generator().manual_seed(self.seed)
        best = first = error(block, layers, job)
        kept = [leaf.clone() for leaf in only]
        power = sum(float(t.float().square().sum()) for t in job.targets)
        m = [torch.zeros_like(x) for x in only]; v = [torch.zeros_like(x) for x in only]
        order: list[int] = []
        for step in range(self.steps):
            if len(order) < self.batch:
                order = torch.randperm(len(job.calls), generator=generator).tolist()
            chosen, order = order[: self.batch], order[self.batch :]
            gradients = gradient(block, layers, job, chosen, only)
            share = 1 - step / self.steps
            for i, ((leaf, lr), g) in enumerate(zip(leaves, gradients)):
                if self.adam:
                    m[i].mul_(0.9).add_(g, alpha=0.1); v[i].mul_(0.99).addcmul_(g, g, value=0.01)
                    leaf.sub_(m[i] / (1 - 0.9 ** (step + 1)) / ((v[i] / (1 - 0.99 ** (step + 1))).sqrt() + 1e-12), alpha=lr * share)
                else:
                    leaf.sub_(torch.sign(g), alpha=lr * share)
            for each in trained.values():
                each.hold()
            if (step + 1) % self.evaluate == 0 or step + 1 == self.steps:
                now = error(block, layers, job)
                if now < best:
                    best = now
                    for k, l in zip(kept, only): k.copy_(l)
        for k, l in zip(kept, only): l.copy_(k)
        return first / power, best / power

    def _lr(self, of_scale):
        lr = self.lr or 1 / self.steps
        return (self.minmax_lr or lr) if of_scale else lr


def error(block, layers, job) -> float:
    total = 0.0
    with torch.no_grad():
        for layer in layers:
            layer.renew()
        for call, target in zip(job.calls, job.targets, strict=True):
            total += float((call.run(block).float() - target.float()).square().sum())
    return total


def gradient(block, layers, job, chosen, leaves) -> list[Any]:
    for leaf in leaves:
        leaf.requires_grad_(True)
    with torch.enable_grad():
        for layer in layers:
            layer.renew()
        weights = [layer.weight for layer in layers if layer.trained is not None]
        hooks = [w.detach().requires_grad_(True) for w in weights]
        for layer, w in zip([l for l in layers if l.trained is not None], hooks):
            layer.weight = w
        for index in chosen:
            off = job.calls[index].run(block).float() - job.targets[index].float()
            off.square().mean().backward(inputs=hooks)
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in hooks]
        found = torch.autograd.grad(weights, leaves, grads, allow_unused=True)
    for leaf in leaves:
        leaf.requires_grad_(False)
    return [torch.zeros_like(l) if g is None else g for g, l in zip(found, leaves)]
