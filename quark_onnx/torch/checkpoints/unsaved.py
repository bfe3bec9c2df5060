"""Parameters that transformers computes and does not save.

Example: Marian's sinusoidal position embeddings.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from quark_onnx.torch.checkpoints.parameter_sources import Sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compute_unsaved(model: PreTrainedModel, stored: Sources) -> None:
    """Compute empty parameters that transformers leaves out of checkpoints.

    Their values are fixed. They become non-persistent buffers: no later step reads them from a
    file, or empties them.

    Args:
        model: model of transformers. Parameters with values are unchanged.
        stored: tensors of the checkpoint, which have priority.
    """
    # Sorted, since the entry is a set in some models.
    for name in sorted(getattr(model, "_keys_to_ignore_on_save", None) or ()):
        owner_name, _, parameter_name = name.rpartition(".")
        try:
            owner = model.get_submodule(owner_name)
        except AttributeError:  # the key is one of another model of the family
            continue
        parameter = owner._parameters.get(parameter_name)
        if parameter is None or parameter.device.type != "meta" or name in stored:
            continue
        # A copy, since ``_init_weights`` fills all parameters of a module.
        filled = copy.deepcopy(owner).to_empty(device="cpu")
        with torch.no_grad():
            model._init_weights(filled)
        del owner._parameters[parameter_name]
        owner.register_buffer(
            parameter_name,
            filled.get_parameter(parameter_name).detach(),
            persistent=False,
        )
