"""Parameters that transformers computes and does not save, as Marian's sinusoidal embeddings of
positions.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from quark_onnx.torch.checkpoints.parameter_sources import Sources


def compute_unsaved(model: Any, stored: Sources) -> None:
    """Compute the empty parameters that transformers leaves out of checkpoints because their values
    are fixed.

    They become buffers that are not saved either: nothing reads them from a file, and nothing
    empties them.

    Args:
        model: of transformers, with empty parameters; others are left as they are.
        stored: the tensors of the checkpoint; parameters that it has are read from it.
    """
    for name in sorted(getattr(model, "_keys_to_ignore_on_save", None) or ()):
        owner_name, _, own = name.rpartition(".")
        try:
            owner = model.get_submodule(owner_name)
        except AttributeError:  # the key is one of another model of the family
            continue
        parameter = owner._parameters.get(own)
        if parameter is None or parameter.device.type != "meta" or name in stored:
            continue
        filled = copy.deepcopy(owner).to_empty(device="cpu")
        with torch.no_grad():
            model._init_weights(filled)
        del owner._parameters[own]
        owner.register_buffer(own, filled.get_parameter(own).detach(), persistent=False)
