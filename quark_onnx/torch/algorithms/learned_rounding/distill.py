"""Distillation: train the rounding of all weights on the predictions of the float model.

Liu et al. 2023, "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models": the
float model is the teacher, and writes the training text. Roundings and ranges are trained as by
``SignedRounding``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from quark_onnx.common.containers import grouped_by
from quark_onnx.common.errors import DataError, ModelError
from quark_onnx.common.progress import Progress
from quark_onnx.common.registry import ALGORITHMS
from quark_onnx.optimizers.base import require_number, require_whole
from quark_onnx.torch.algorithms.base import Outcome
from quark_onnx.torch.algorithms.learned_rounding.autoround import (
    TrainedLayer,
    descend,
    renew,
    untrainable,
)
from quark_onnx.torch.algorithms.learned_rounding.trainable_weight import (
    TrainableWeight,
)
from quark_onnx.torch.algorithms.learned_rounding.training_state import (
    Descent,
    draws,
    looks,
)
from quark_onnx.torch.algorithms.memory import Shapes
from quark_onnx.torch.algorithms.weight_rounding.levels import TensorLevels
from quark_onnx.torch.calibration.block_stream import call
from quark_onnx.torch.calibration.text import sampled
from quark_onnx.torch.checkpoints.atomic_file import State
from quark_onnx.torch.models.quantized_layer import (
    Layers,
    QuantizedLayer,
    kind_of,
    outputs_first,
)
from quark_onnx.torch.models.structure import put_modules, vocabulary_of
from quark_onnx.torch.runtime.reductions import total

#: How many times the divergence on all of the data is computed during the descent.
_LOOKS = 20
#: Entries of a stored state besides those of the descent: the finished steps, the divergence before
#: the first step, and the text.
_OWN = ("done", "before", "written")
#: Sequences that are written together; logits that are held at once.
_WRITTEN = 64
_LOGITS = 1 << 25


@ALGORITHMS.register("distill")
@dataclass(frozen=True)
class Distillation:
    """Train roundings and ranges of all weights on the divergence from the float model.

    The float model writes the training text, each sequence from the first token of a sample of the
    calibration data. The calibration data itself is not trained on, but selects the result: of the
    start and the running means that are evaluated, the state with the least divergence on the data
    is kept.

    The whole model is in memory, with thirteen numbers for each weight that is trained. The same
    number of threads gives the same codes, as with ``SignedRounding``.

    Attributes:
        steps: number of steps of the descent.
        lr: the learning rate of roundings in the first step, as a share of the distance of two
            codes. The rate falls to nothing towards the last step.
        batch: sequences per step.
        sequences: number of written sequences, which are as long as those of the data.
        seed: the seed of the text and of the order of its sequences.
    """

    name: ClassVar[str] = "distill"
    sums: ClassVar[bool] = False
    stage: ClassVar[str] = "end"
    aims_at_float: ClassVar[bool] = False
    needs_data: ClassVar[bool] = True

    steps: int = 600
    lr: float = 0.005
    batch: int = 8
    sequences: int = 600
    seed: int = 0

    def __post_init__(self) -> None:
        require_whole(self, "steps", "batch", "sequences")
        require_whole(self, "seed", least=0)
        require_number(self, "lr", least=0, most=1)

    def memory(self, shapes: Shapes) -> int:
        """Return the estimated bytes of the whole model in training."""
        # all blocks; the state of SignedRounding and four more numbers per weight; logits of
        # both models, and gradients of one
        return shapes.blocks * shapes.block + 4 * 13 * shapes.count + 3 * 4 * _LOGITS

    def __call__(
        self,
        model: Any,
        layers: Layers,
        data: Sequence[Any],
        progress: bool | None = None,
        state: State | None = None,
    ) -> list[Outcome]:
        """Choose codes; the divergence on the data does not grow.

        Args:
            model: the model with its quantized layers.
            layers: the float layers, by their names in the model.
            data: batches of token ids of shape (samples, tokens), or dicts that have them.
            progress: whether to show a progress bar; None shows it if stderr is a terminal.
            state: the storage of the descent, which is written at each evaluation and read at the
                start; None stores nothing.

        Raises:
            DataError: the data has no token ids.
            ModelError: the model writes no text.
        """
        # Each row is a sequence of its own, (tokens,).
        rows = [row for batch in data for row in _ids(batch)]
        trained = dict[str, TrainedLayer]()
        outcomes = list[Outcome]()
        for name, (float_layer, _) in layers.items():
            layer = model.get_submodule(name)
            # Layers whose weight stays float have nothing to train.
            if not isinstance(layer, QuantizedLayer) or layer.quantized is None:
                continue
            if (steps := TensorLevels.of(layer.quantized)) is None:
                outcomes.append(untrainable(name, self.name, layer.quantized))
                continue
            weight = outputs_first(float_layer.weight.detach(), kind_of(float_layer))
            trainable = TrainableWeight(weight, layer.quantized, steps)
            trained[name] = TrainedLayer(layer, trainable)
        if not trained:
            return outcomes
        floats = {name: layers[name][0] for name in trained}
        pair = _Pair(model, floats, trained)
        with (
            _frozen(model),
            Progress(progress, self.steps, "distilling", "step") as bar,
        ):
            before, after = self._train(pair, rows, bar, state or State())
        for training in trained.values():
            assert training.trained is not None
            training.layer.quantized = training.trained.made()
        note = f"divergence in nats for each token, {self.steps} steps"
        return [*outcomes, Outcome("", self.name, before, after, note)]

    def _train(
        self, pair: _Pair, rows: Sequence[torch.Tensor], bar: Progress, state: State
    ) -> tuple[float, float]:
        """Train the leaves, restore the best state, and return the divergence before and after."""
        weights = [
            layer.trained
            for layer in pair.trained.values()
            if layer.trained is not None
        ]
        descent = Descent(weights, self.steps, self.lr, self.lr)
        stored = state.read()
        done = 0
        # begins anew where something is missing
        if descent.fits(stored) and stored.keys() >= set(_OWN):
            descent.restore(
                {name: tensor for name, tensor in stored.items() if name not in _OWN}
            )
            done = int(stored["done"])
            before = float(stored["before"])
            written = list(stored["written"])
        else:
            with pair.teacher():
                # The teacher writes before anything is trained; a resumed run reads the same text
                # again.
                written = _written(pair.model, rows, self)
            before = descent.look(lambda: pair.divergence(rows))
        looked_at = set(looks(self.steps, _LOOKS))
        batches = draws(len(written), self.batch, self.seed)
        for step, chosen in zip(range(self.steps), batches, strict=False):
            # A resumed run draws the samples of finished steps, too, so that the order stays.
            if step < done:
                continue
            pair.descend([written[index] for index in chosen], descent.leaves)
            descent.step(1 - step / self.steps)
            if step + 1 in looked_at:
                # Only means: with few rows, a single state may be better by luck.
                descent.look_at_means(lambda: pair.divergence(rows))
                entries = (
                    torch.tensor(step + 1),
                    # A State holds tensors alone.
                    torch.tensor(before, dtype=torch.float64),
                    torch.stack(written),
                )
                state.write(descent.state() | dict(zip(_OWN, entries, strict=True)))
            bar.update(step + 1)
        return before, descent.finish()


class _Pair:
    """A quantized model that shares everything but weights with the float model.

    Args:
        model: the model; each context puts its quantized layers back at the end.
        floats, trained: layers by their names in the model.
    """

    def __init__(
        self,
        model: Any,
        floats: Mapping[str, nn.Module],
        trained: Mapping[str, TrainedLayer],
    ) -> None:
        self.model = model
        self._floats = floats
        self.trained = trained

    @contextlib.contextmanager
    def teacher(self) -> Iterator[None]:
        """Run the model as the float model inside the context."""
        with self._put(self._floats):
            yield

    @contextlib.contextmanager
    def _put(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        put_modules(self.model, layers)
        try:
            yield
        finally:
            quantized = {name: layer.layer for name, layer in self.trained.items()}
            put_modules(self.model, quantized)

    def divergence(self, rows: Sequence[torch.Tensor]) -> float:
        """Return the mean divergence over all tokens in nats; infinite for NaN."""
        sums = list[torch.Tensor]()
        counts = list[int]()
        with torch.no_grad():
            renew(self.trained.values())
            for part in self._parts(rows):
                sums.append(self._sum(part))
                counts.append(part.numel())
        divergence = sum(float(part_sum) for part_sum in sums) / sum(counts)
        # NaN would compare as no worse than anything.
        return divergence if divergence == divergence else float("inf")

    def descend(
        self, rows: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
    ) -> None:
        """Add the gradients of some sequences to the leaves."""
        count = sum(row.numel() for row in rows)
        losses = (self._sum(part) / count for part in self._parts(rows))
        descend(list(self.trained.values()), losses, leaves)

    def _sum(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the summed divergence over all tokens of ids, (samples, tokens)."""
        with torch.no_grad(), self.teacher():
            # (samples, tokens, vocabulary), of the float model.
            wanted = torch.log_softmax(_logits(self.model, ids), -1)
        with self._put(self.trained):
            predicted = torch.log_softmax(_logits(self.model, ids), -1)
        # KL(float || quantized), summed over vocabulary and tokens, in nats.
        return total(F.kl_div(predicted, wanted, log_target=True, reduction="none"))

    def _parts(self, rows: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield batches of sequences of equal length, (samples, tokens)."""
        # As many sequences as their logits fit into _LOGITS numbers, at least one.
        for length, alike in grouped_by(rows, len).items():
            count = max(1, _LOGITS // (length * vocabulary_of(self.model)))
            yield from torch.stack(alike).split(count)


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = call(model, {"input_ids": ids}).logits
    return logits.float()


def _ids(batch: Any) -> torch.Tensor:
    """Return the token ids of a batch, (samples, tokens)."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise DataError(
            "distill learns from token ids of shape (samples, tokens); the data yields"
            " something else",
        )
    return ids


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Disable the gradients of parameters inside the context."""
    # Gradients of parameters would take as much memory as the model, and nobody reads them.
    parameters = [tensor for tensor in model.parameters() if tensor.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _written(
    model: Any, rows: Sequence[torch.Tensor], how: Distillation
) -> list[torch.Tensor]:
    """Sample sequences of token ids, (tokens,), from the model's own predictions."""
    if not hasattr(model, "generate"):
        raise ModelError(
            f"distill has the float model write text, which a {type(model).__name__}"
            " does not",
        )
    length = max(len(row) for row in rows)
    if length < 2:
        raise DataError("distill needs samples of two tokens or more")
    # (sequences, 1): the samples are used in turn.
    first = torch.stack([rows[index % len(rows)][:1] for index in range(how.sequences)])
    sequences = list[torch.Tensor]()
    # The seed holds in here alone: the caller's random state is restored.
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(how.seed)
        if model(input_ids=first[:1]).logits.isnan().any():
            raise ModelError(
                "the float model predicts NaN, from which distill cannot learn; check its"
                " float tensors",
            )
        for part in first.split(_WRITTEN):
            sequences += sampled(model, part, length)
    return sequences
