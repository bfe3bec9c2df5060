"""Group sizes that divide the inputs of all layers of a model."""

from __future__ import annotations

from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.config.schemes import fitting, groupings
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.quantized_layer import inputs_of
from quark_onnx.torch.pipelines.in_memory import chosen_layers


def fitting_schemes(source: FloatCheckpoint, config: TorchConfig) -> list[str]:
    """Return the schemes of the format of a configuration whose groups divide the inputs.

    Args:
        source: the float model.
        config: the configuration; its default is in groups.

    Returns:
        Names of schemes, the one with the greatest groups first. Empty for a format without
        schemes in groups of several sizes.
    """
    grouped = [
        spec
        for spec in groupings(config.default).values()
        if spec.weight is not None and spec.weight.group
    ]
    if not grouped:
        return []
    # layers with fewer inputs than a group stay float: small groups quantize the most layers
    config = config.with_(default=grouped[-1])
    chosen, _ = chosen_layers(source.model, config, source.reader)
    widths = {
        inputs_of(module) for module, spec in chosen.values() if spec == grouped[-1]
    }
    return fitting(config.default, widths)
