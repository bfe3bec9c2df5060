"""SpinQuant (Liu et al. 2024): rotations learned on the loss of the quantized model.

Cayley SGD (Li, Fuxin and Todorovic 2020) moves on the orthogonal matrices: the gradient gives a
skew-symmetric matrix W, and ``(I - W/2)^-1 (I + W/2)`` is orthogonal. Rounding passes gradients
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from quark_onnx.common.errors import DataError
from quark_onnx.common.progress import Progress
from quark_onnx.torch.algorithms.learned_rounding.trainable_weight import through
from quark_onnx.torch.algorithms.rotation.weight_rewrites import STREAM, WeightRewrites
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats.quantized_tensor import fake_quantize, quantize
from quark_onnx.torch.models.online_rotation import OrthogonalMatrix
from quark_onnx.torch.models.quantized_layer import Layers, kind_of, outputs_first

#: The share of the last direction that is kept.
_MOMENTUM = 0.9
#: How many times the loss of all data is computed during the learning.
_LOOKS = 10


@dataclass(frozen=True)
class RotationTraining:
    """Settings of the learning of rotations.

    Attributes:
        steps: number of steps of gradient descent.
        rate: the angle of the first step in radians, the root mean square over planes. The angle
            falls to nothing towards the last step.
        batch: samples per step.
        seed: the seed of the order of samples.
        centered: whether rotations of the residual stream keep the vector of ones.
        progress: whether to show a progress bar; None shows it if stderr is a terminal.
    """

    steps: int = 100
    rate: float = 0.02
    batch: int = 8
    seed: int = 0
    centered: bool = False
    progress: bool | None = None


@dataclass(frozen=True)
class Learned:
    """Learned rotations.

    Attributes:
        matrices: the rotations, by name.
        before, after: the mean loss of all data, with the first of the starts and with
            ``matrices``.
    """

    matrices: dict[str, torch.Tensor]
    before: float
    after: float


class Trainee:
    """A model with weights that are rotated and rounded in every run.

    Args:
        model: the float model, which stays unchanged.
        plan: the rewrites of its parameters.
        layers: the quantized layers, with their specs.
        fixed: rotations that are not learned.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: WeightRewrites,
        layers: Layers,
        fixed: Mapping[str, OrthogonalMatrix],
    ) -> None:
        self._model = model
        self._plan = plan
        self._layers = layers
        self._fixed = fixed
        self.device = next(model.parameters()).device
        # In float32: rewrites of every step start from the original weights.
        self._floats = {
            name: parameter.detach().float()
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    def loss(
        self, matrices: Mapping[str, torch.Tensor], ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the mean negative log likelihood of tokens, (samples, length), without the first.

        Args:
            matrices: the rotations, by name.
            ids: the tokens.
        """
        rotations = dict(self._fixed)
        for name, matrix in matrices.items():
            rotations[name] = OrthogonalMatrix((matrix,))
        # Unchanged parameters are shared, rewritten ones replaced.
        tensors = dict(self._floats)
        for name, rewrite in self._plan.rewrites.items():
            tensors[name] = rewrite(tensors[name], self._floats.__getitem__, rotations)
        for name, (module, spec) in self._layers.items():
            if spec.weight is not None:
                weight = outputs_first(tensors[f"{name}.weight"], kind_of(module))
                # Straight-through estimator: rounded values forward, the gradient of the identity
                # backward.
                rounded = quantize(weight.detach(), spec.weight, name).dequantize()
                tensors[f"{name}.weight"] = outputs_first(
                    through(weight, rounded), kind_of(module)
                )
        with self._rounding(rotations):
            logits = functional_call(
                self._model,
                tensors,
                (ids,),
                # The head was untied, and transformers would tie it again.
                tie_weights=False,
            ).logits
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(),
            ids[:, 1:].flatten(),
        )

    @contextmanager
    def _rounding(self, rotations: Mapping[str, OrthogonalMatrix]) -> Iterator[None]:
        """Rotate and round the inputs of layers as the quantized model does."""
        with ExitStack() as stack:
            for name, key in self._plan.online.items():
                module = self._model.get_submodule(name)
                hook = _changing(rotations[key].turn)
                stack.enter_context(module.register_forward_pre_hook(hook))
            for name, (_, spec) in self._layers.items():
                if spec.input is not None:
                    module = self._model.get_submodule(name)
                    hook = _changing(_rounded(spec.input))
                    stack.enter_context(module.register_forward_pre_hook(hook))
            yield


def learn(
    trainee: Trainee,
    starts: Sequence[Mapping[str, torch.Tensor]],
    data: Sequence[Any],
    how: RotationTraining,
) -> Learned:
    """Learn rotations from the best of several starts, and return the best that were seen.

    Args:
        trainee: computes the loss.
        starts: orthogonal matrices by name, in float64.
        data: token ids, each of shape (samples, length), all of one length.
        how: the settings.

    Raises:
        DataError: there is no data.
    """
    rows = _rows(data).to(trainee.device)
    # All of the data for each start, as the choice must not depend on a batch.
    losses = [_mean_loss(trainee, start, rows, how.batch) for start in starts]
    before = losses[0]
    least = min(losses)
    best = dict(starts[losses.index(least)])
    now = dict(best)
    moments = {name: torch.zeros_like(matrix) for name, matrix in best.items()}
    random = torch.Generator().manual_seed(how.seed)
    with Progress(how.progress, how.steps, "learning rotations", "step") as bar:
        for step in range(how.steps):
            # (batch, length): each step draws anew.
            chosen = rows[torch.randperm(len(rows), generator=random)[: how.batch]]
            gradients = _gradients(trainee, now, chosen)
            angle = how.rate * (1 - step / how.steps)
            for name, gradient in gradients.items():
                now[name], moments[name] = cayley_step(
                    now[name],
                    moments[name] * _MOMENTUM - gradient,
                    angle,
                    how.centered and name == STREAM,
                )
            if (step + 1) % max(how.steps // _LOOKS, 1) == 0:
                loss = _mean_loss(trainee, now, rows, how.batch)
                if loss < least:
                    least = loss
                    best = dict(now)
            bar.update(step + 1)
    return Learned(best, before, least)


def cayley_step(
    matrix: torch.Tensor,
    direction: torch.Tensor,
    angle: float,
    centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step on the orthogonal matrices; return the matrix and the tangent part of the direction.

    Args:
        matrix: orthogonal, of shape (n, n).
        direction: the direction of the step, of the same shape.
        angle: the length of the step in radians, the root mean square over planes.
        centered: whether the matrix keeps the vector of ones, multiplied from the left, and goes on
            doing so.
    """
    size = len(matrix)
    # The tangent space at an orthogonal matrix M: W M with W skew-symmetric, W + W^T = 0.
    product = direction @ matrix.T
    skew = (product - product.T) / 2
    # Rows and columns of W sum up to 0, so that W maps the vector of ones to 0.
    if centered:
        skew = skew - skew.mean(0)
        skew = skew - skew.mean(1, keepdim=True)
    tangent = skew @ matrix
    # The norm of a skew-symmetric matrix counts each plane twice.
    scale = angle * size**0.5 / skew.norm().clamp_min(1e-30)
    identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    half = scale * skew / 2
    # The Cayley transform is orthogonal for every step length.
    return torch.linalg.solve(identity - half, (identity + half) @ matrix), tangent


def _gradients(
    trainee: Trainee, matrices: Mapping[str, torch.Tensor], rows: torch.Tensor
) -> dict[str, torch.Tensor]:
    leaves = {
        name: matrix.clone().requires_grad_() for name, matrix in matrices.items()
    }
    with torch.enable_grad():
        loss = trainee.loss(leaves, rows)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, gradients, strict=True))


def _mean_loss(
    trainee: Trainee,
    matrices: Mapping[str, torch.Tensor],
    rows: torch.Tensor,
    batch: int,
) -> float:
    with torch.no_grad():
        # Weighted by samples: the last part may be smaller.
        losses = [
            float(trainee.loss(matrices, part)) * len(part)
            for part in rows.split(batch)
        ]
    return sum(losses) / len(rows)


def _rows(data: Sequence[Any]) -> torch.Tensor:
    """Return the token ids of all samples, (samples, length)."""
    ids = [
        batch["input_ids"] if isinstance(batch, Mapping) else batch for batch in data
    ]
    tensors = [rows for rows in ids if isinstance(rows, torch.Tensor)]
    lengths = {rows.shape[1:] for rows in tensors}
    if len(tensors) < len(ids) or len(lengths) != 1:
        raise DataError(
            "rotations are learned on token ids, all samples of one length; the data"
            " yields something else",
        )
    return torch.cat(tensors)


def _rounded(spec: TensorSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: through(x, fake_quantize(x.detach(), spec))


def _changing(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda module, args: (change(args[0]), *args[1:])
