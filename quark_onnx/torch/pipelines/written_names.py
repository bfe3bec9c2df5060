"""Rules by which a run from file to file writes or copies float tensors.

The run, the check before it and the prediction of its size decide by the same rules.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from quark_onnx.torch.checkpoints.parameter_sources import Sources
from quark_onnx.torch.config.algorithm_order import at_stage
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.names import joined, persistent_buffers

if TYPE_CHECKING:
    from torch import nn


def untouched_names(
    name: str,
    module: nn.Module,
    sources: Sources,
    chosen: Container[str],
    config: TorchConfig,
) -> list[str]:
    """Return the full names of the parameters and buffers that are written for a float module.

    A tied parameter is written once, if its twin stays float. Tensors that are copied from file to
    file and buffers that the checkpoint lacks are left out.

    Args:
        name: full name of the module, empty for the model.
        module: the module; children are not included.
        sources: tensors of the checkpoint.
        chosen: names of the quantized layers.
        config: the quantization configuration.
    """
    ends = [
        *dict(module.named_parameters(recurse=False)),
        *persistent_buffers(module),
    ]
    names = list[str]()
    for key in (joined(name, end) for end in ends):
        twin = sources.tied.get(key)
        # the twin is written with its own module, unless that is quantized and so has codes alone
        is_written = twin is None or twin.rpartition(".")[0] in chosen
        if (
            is_written
            and key in sources
            and not is_copied(key, sources, chosen, config)
        ):
            names.append(key)
    return names


def mark_written(
    name: str,
    module: nn.Module,
    sources: Sources,
    chosen: Container[str],
    config: TorchConfig,
) -> None:
    """Mark the stored tensors of a module and its children as written, except copied tensors.

    Args:
        name: full name of the module.
        module: the module.
        sources: tensors of the checkpoint.
        chosen: names of the quantized layers.
        config: the quantization configuration.
    """
    for end, _ in module.named_parameters():
        key = f"{name}.{end}"
        if key in sources and not is_copied(key, sources, chosen, config):
            sources.mark(key)


def is_copied(
    name: str, sources: Sources, chosen: Container[str], config: TorchConfig
) -> bool:
    """Return whether the stored tensors of a converted parameter are copied.

    They are copied if no layer that is converted from them is quantized or rewritten.

    Args:
        name: full name of a parameter in the model.
        sources: tensors of the checkpoint.
        chosen: names of the quantized layers.
        config: the quantization configuration, whose algorithms may rewrite weights.

    Returns:
        True or False; False for parameters that are stored under their own names.
    """
    converted = sources.made_with(name)
    if not converted or at_stage(config.algorithms, "model", "block"):
        return False
    return not any(name.rpartition(".")[0] in chosen for name in converted)
