"""The parts of a language model around the blocks: embeddings, last norm and head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.algorithms.rotation.residual_stream import ModelPart, floats_of
from quark_onnx.torch.calibration.block_stream import call, in_form
from quark_onnx.torch.models.names import joined, outside_of, replaced_forwards


@dataclass(frozen=True)
class EmbeddingsAndHead:
    """A model without blocks: hidden states pass from the embeddings to the head.

    Attributes:
        model: the model.
        blocks: its blocks, by name.
        batch: the sample that the model runs on.
        form: the output of the first block: a tensor, or a tuple that starts with one.
    """

    model: nn.Module
    blocks: Mapping[str, nn.Module]
    batch: Any
    form: Any

    def run(
        self,
        hidden: torch.Tensor | None,
        changed: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states before the blocks, and the output of the model.

        Args:
            hidden: hidden states in place of the output of the blocks; None for their input.
            changed: rewritten parameters, by name.
        """
        # The blocks are called one after the other: the first entry is the input of the first
        # block.
        front = list[torch.Tensor]()

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            front.append(args[0] if args else kwargs["hidden_states"])
            # Each block passes on what it reads, or the given hidden states.
            return in_form(front[0] if hidden is None else hidden, self.form)

        # The whole model outside of the blocks in float32, with the rewritten parameters.
        tensors = self.tensors() | dict(changed or {})
        stand_ins = dict.fromkeys(self.blocks, stand_in)
        with replaced_forwards(self.blocks, stand_ins), torch.no_grad():
            output = call(
                lambda *args, **kwargs: functional_call(
                    self.model, tensors, args, kwargs, tie_weights=False
                ),
                self.batch,
            )
        # Models of transformers return an object with logits; others a tensor or a tuple.
        output = getattr(output, "logits", output)
        return front[0], output if isinstance(output, torch.Tensor) else output[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers outside of blocks, floats as float32."""
        # A tied weight appears under each of its names.
        return {
            joined(name, key): tensor
            for name, module in self._modules().items()
            for key, tensor in floats_of(module, recurse=False).items()
        }

    def front(self) -> ModelPart:
        """Return the part before the blocks."""
        return ModelPart(self._modules(), lambda hidden: self.run(hidden)[0])

    def back(self) -> ModelPart:
        """Return the part after the blocks."""
        return ModelPart(self._modules(), lambda hidden: self.run(hidden)[1])

    def check_reached(self) -> None:
        """Raise ModelError for a module outside of the blocks that text does not reach.

        Such a module may read or write the stream unseen.
        """
        seen = self.front().seen(None)
        for name, module in self._modules().items():
            # Modules without parameters (dropout, activations) change no rotation.
            if list(module.parameters(recurse=False)) and name not in seen.outputs:
                raise ModelError(
                    f"{name} is not run on the sample: what it does to the residual"
                    " stream is unknown, so that the model cannot be rotated",
                )

    def _modules(self) -> dict[str, nn.Module]:
        return outside_of(dict(self.model.named_modules()), self.blocks)
