"""quantize_model: put quantized layers in the place of float ones, block by block."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

from quark_onnx.errors import DataError, ModelError
from quark_onnx.progress import Progress
from quark_onnx.torch.config import TorchConfig
from quark_onnx.torch.experts import unfuse_experts
from quark_onnx.torch.layers import QuantizedLayer, kind_of, outputs_first
from quark_onnx.torch.observe import Watching
from quark_onnx.torch.quantized import Quantized, quantize
from quark_onnx.torch.spec import LayerSpec
from quark_onnx.torch.structure import blocks_of, layers_of, put_modules, routers_of, shared_among, within
from quark_onnx.torch.walk import Walk, batches, call, inference

logger = logging.getLogger(__name__)


@dataclass
class TorchReport:
    """What became of a model.

    Attributes:
        quantized: specs of the layers that are quantized, by name.
        kept: names of the layers that stay float, each with the reason.
        notes: what a user should know.
    """

    quantized: dict[str, LayerSpec] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def weight_only(self, name: str) -> LayerSpec:
        """Note that the data has not reached a layer, and return how it is quantized then."""
        self.notes.append(f"{name} was not run on the data: only its weight is quantized")
        self.quantized[name] = LayerSpec(self.quantized[name].weight)
        return self.quantized[name]


Layers = dict[str, tuple[Any, LayerSpec]]


def chosen_layers(model: Any, config: TorchConfig) -> tuple[Layers, dict[str, str]]:
    """The layers that are quantized, with their specs, and those that stay float, each with the reason.

    Raises:
        ConfigError: a name of the configuration matches no layer.
    """
    found = layers_of(model)
    config.check(found)
    named = [glob for glob, _ in config.layers]
    routers = [name for name in routers_of(model) if name not in named]
    chosen, kept = Layers(), dict[str, str]()
    for name, (module, kind) in found.items():
        spec = config.spec_of(name, kind)
        if name in routers:
            kept[name] = "it chooses among experts"
        elif spec is None:
            kept[name] = "excluded" if config.exclude else "nothing asks for it"
        else:
            chosen[name] = (module, spec)
    return chosen, kept | _no_layers(model, found)


def _no_layers(model: Any, layers: Container[str]) -> dict[str, str]:
    """Matrices inside of blocks that are no layers, each with why it stays float."""
    found = dict[str, str]()
    for block, module in blocks_of(model).items():
        for name, parameter in module.named_parameters():
            owner = f"{block}.{name}".rpartition(".")[0]
            if parameter.ndim > 1 and owner not in layers:
                kind = type(model.get_submodule(owner)).__name__
                found[f"{block}.{name}"] = f"it is a weight of {kind}, which is no layer that can be quantized"
    return found


def quantize_model(
    model: Any, config: TorchConfig, data: Iterable[Any] | None = None, *, progress: bool | None = None
) -> TorchReport:
    """Quantize a model in place.

    Args:
        model: any module; the blocks of a language model are found by its structure, and stacks of experts are taken
            apart.
        data: batches: tensors, dicts of keywords or lists of arguments; read once, and only where scales of
            activations are to be found.
        progress: whether to show a progress bar; None shows it if stderr is a terminal.

    Raises:
        ConfigError: a name of the configuration matches no layer.
        DataError: data is needed and missing, or the model cannot be run on it.
        ModelError: a weight holds no numbers, or the model is quantized already.
    """
    _check_float(model)
    unfuse_experts(model)
    chosen, kept = chosen_layers(model, config)
    report = TorchReport({name: spec for name, (_, spec) in chosen.items()}, kept)
    if not measures(chosen):
        made = dict[str, Any]()
        with Progress(progress, len(chosen), "quantizing", "layer") as bar:
            for done, (name, (module, spec)) in enumerate(chosen.items(), 1):
                made[name] = QuantizedLayer(module, weight_of(module, spec, name), spec)
                bar.update(done)
        put_modules(model, made)
        return report
    if data is None:
        raise DataError("scales of activations are to be found, but no calibration data was given")
    data = list(batches(data))
    with inference(model):
        if not _walk(model, chosen, data, config, progress, report):
            _whole(model, chosen, data, config, report)
    return report


def _check_float(model: Any) -> None:
    found = next((name for name, module in model.named_modules() if isinstance(module, QuantizedLayer)), None)
    if found is not None:
        raise ModelError(f"{found or 'the model'} is quantized already; start from the float model")
    if kind_of(model) is not None:
        raise ModelError(f"the model is a single {type(model).__name__}; put it into a module, as nn.Sequential(model)")


def _walk(
    model: Any, chosen: Layers, data: list[Any], config: TorchConfig, progress: bool | None, report: TorchReport
) -> bool:
    """Quantize block by block; scales are those of the float model, as AMD Quark's are.

    Returns:
        Whether this was possible: what is measured lies in blocks that are run once for a sample, one after the other.
    """
    blocks = blocks_of(model)
    parts = {block: inside(chosen, block) for block in blocks}
    rest = {name: entry for name, entry in chosen.items() if not any(name in part for part in parts.values())}
    if not any(measures(part) for part in parts.values()) or measures(rest) or shared_among(model, blocks, chosen):
        return False
    try:
        walk = Walk(model, blocks, data)
    except ModelError as error:
        logger.debug("the model is run as a whole: %s", error)
        return False
    with Progress(progress, len(blocks) * len(walk), "quantizing", "sample") as bar:
        for index, (name, block) in enumerate(blocks.items()):
            with Watching(parts[name]) as watching:
                for done in walk.run(name, block):
                    bar.update(index * len(walk) + done)
            finish(model, parts[name], watching, config, report)
    finish(model, rest, Watching({}), config, report)
    return True


def _whole(model: Any, layers: Layers, data: list[Any], config: TorchConfig, report: TorchReport) -> None:
    """Quantize layers of a model that is run as a whole."""
    if not data:
        raise DataError("the calibration data is empty")
    with Watching(layers) as watching:
        for count, batch in enumerate(data):
            try:
                call(model, batch)
            except DataError:
                raise
            except Exception as error:
                raise DataError(f"the model cannot be run on sample {count}: {error}") from error
    finish(model, layers, watching, config, report)


def weight_of(module: Any, spec: LayerSpec, name: str) -> Quantized | None:
    """The codes of a layer's weight, each rounded to the nearest; None where it stays float."""
    if spec.weight is None:
        return None
    return quantize(outputs_first(module.weight.detach(), kind_of(module)), spec.weight, name)


def finish(model: Any, layers: Layers, watching: Watching, config: TorchConfig, report: TorchReport) -> None:
    """Put quantized layers in the place of those that were watched."""
    least = config.kv_cache.least if config.kv_cache else 0.0
    made = dict[str, Any]()
    for name, (module, spec) in layers.items():
        inputs, outputs = watching.inputs.get(name), watching.outputs.get(name)
        read = inputs.params() if inputs else None
        computed = outputs.params(least) if outputs else None
        if (inputs and read is None) or (outputs and computed is None):
            spec = report.weight_only(name)
        made[name] = QuantizedLayer(module, weight_of(module, spec, name), spec, read, computed)
    put_modules(model, made)


def inside(layers: Layers, block: str) -> Layers:
    """Those of the layers that are part of a block."""
    return {name: entry for name, entry in layers.items() if within(name, block)}


def measures(layers: Layers) -> bool:
    """Whether there are scales that only data can tell."""
    return any(spec.measures for _, spec in layers.values())
