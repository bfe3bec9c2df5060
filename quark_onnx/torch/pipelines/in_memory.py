"""quantize_model: replace float layers by quantized ones in memory, block by block."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.torch.algorithms.rotation.rotate import rotate
from quark_onnx.torch.calibration.block_stream import (
    BlockStream,
    NotWalkable,
    batches,
)
from quark_onnx.torch.calibration.observers import Scales
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.config.torch_config import (
    OPERATORS,
    TorchConfig,
    matching,
    require_config,
)
from quark_onnx.torch.models.attention import install_attention_hooks, notes_of
from quark_onnx.torch.models.experts import unfuse_experts
from quark_onnx.torch.models.float_weights import (
    EMPTY,
    ROUTER,
    TOO_NARROW,
    UNCALLED,
    check_not_all_float,
    fills_a_group,
    notes_on_kept,
    notes_on_stacks,
    other_weights_of,
    reason_of,
)
from quark_onnx.torch.models.forward_trace import never_called
from quark_onnx.torch.models.layer_patterns import (
    LayerPatterns,
    asked_for,
    with_layer_names,
)
from quark_onnx.torch.models.mixtures import routers_of
from quark_onnx.torch.models.names import outside_of
from quark_onnx.torch.models.quantized_layer import (
    Layers,
    QuantizedLayer,
    kind_of,
    unlike_its_base,
)
from quark_onnx.torch.models.structure import (
    layers_of,
    put_modules,
    shared_among,
)
from quark_onnx.torch.pipelines.block import (
    measures,
    missing_data,
    needs_data,
    quantize_data_free,
    rotations_of,
    specs_of,
    weight_algorithms,
)
from quark_onnx.torch.pipelines.flow import (
    QuantizationRun,
    quantize_with_data,
    quantize_without_data,
)
from quark_onnx.torch.pipelines.report import TorchReport
from quark_onnx.torch.runtime import distributed

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)


def chosen_layers(
    model: nn.Module,
    config: TorchConfig,
    stored: Iterable[str] = (),
) -> tuple[dict[str, tuple[Any, LayerSpec]], dict[str, str]]:
    """Choose the layers to quantize.

    Args:
        model: model with unfused experts.
        config: the quantization configuration.
        stored: names of the tensors in the model's files, which globs may match.

    Returns:
        The layers to quantize with their specs, and the layers that stay float, with the reason.

    Raises:
        ConfigError: a name of the configuration matches no layer, or no layer would be quantized.
    """
    # modules have no operators between them, which an exported graph has
    for kind, _ in config.types:
        if kind in OPERATORS:
            raise ConfigError(
                f"types names {kind!r}, an operator; quantize_graph quantizes"
                " those, in exported models",
            )
    layers = layers_of(model)
    unfit = _unfit_layers(model)
    for glob in config.named:
        names = matching(dict.fromkeys((*layers, *unfit)), glob)
        if names and unfit.keys() >= set(names):
            raise ConfigError(
                f"layers names {glob!r}, but {names[0]} cannot be quantized:"
                f" {unfit[names[0]]}",
            )
    patterns = LayerPatterns(model, layers, stored)
    config = with_layer_names(config, patterns, model)
    # names and globs without a layer are errors, mostly typing errors
    config.check(layers)
    # a router that the configuration names is quantized like any other layer
    routers = set(routers_of(model))
    routers -= asked_for(config, patterns, routers)
    specs = {name: config.spec_of(name, kind) for name, (_, kind) in layers.items()}
    narrow = {
        name for name, spec in specs.items() if not fills_a_group(layers[name][0], spec)
    }
    narrow -= asked_for(config, patterns, narrow)
    # later reasons have priority
    reasons = dict.fromkeys(narrow, TOO_NARROW) | unfit
    for name, spec in specs.items():
        if name in routers:
            reasons[name] = ROUTER
        elif not layers[name][0].weight.numel():
            # a part of the model that its configuration gives a width of 0
            reasons[name] = EMPTY
        elif spec is None:
            reasons[name] = reason_of(name, config)
    kept = {name: reasons[name] for name in layers if name in reasons}
    chosen = {
        name: (layers[name][0], spec)
        for name, spec in specs.items()
        if spec is not None and name not in kept
    }
    # matrices that no quantizable layer holds, with the reason
    kept |= other_weights_of(model, layers, routers)
    check_not_all_float(chosen, kept)
    return chosen, kept


def _unfit_layers(model: nn.Module) -> dict[str, str]:
    """Return the layers that cannot be quantized, with the reason.

    They are subclasses of Linear and other layers that compute something else, and layers that no
    forward calls.
    """
    unfit = dict.fromkeys(never_called(model), UNCALLED)
    for name, module in model.named_modules():
        if (reason := unlike_its_base(module)) is not None:
            unfit[name] = reason
    return unfit


def quantize_model(
    model: nn.Module,
    data: Iterable[Any] | None,
    config: TorchConfig,
    *,
    progress: bool | None = None,
) -> TorchReport:
    """Quantize a model in place.

    After an error, the layers are float and the model computes the same function. Rotations and
    rescalings of the weights up to the error may remain.

    Args:
        model: any module. The blocks of a language model are found by structure. Stacked experts
            are split into layers.
        data: batches: tensors, dicts of keywords or lists of arguments. They are read once, and
            only if activation scales are calibrated or an algorithm learns from data. If
            torch.distributed is initialized, each process gets all data, and runs a part. None for
            weights that need no data.
        config: the quantization configuration.
        progress: whether to show a progress bar; None shows it if stderr is a terminal.

    Returns:
        The report on all layers.

    Raises:
        ConfigError: a name of the configuration matches no layer, or no layer would be quantized.
        DataError: data is needed and missing, or the model cannot be run on it.
        ModelError: a weight holds no numbers, or the model is quantized already.
    """
    require_config(config)
    _check_float(model)
    # before layers are chosen, as each expert becomes a layer with a name
    unfuse_experts(model)
    chosen, kept = chosen_layers(model, config)
    if data is None and needs_data(chosen, config):
        raise DataError(missing_data(chosen))
    check_ranks(config)
    notes = notes_of(model, chosen, config, kept)
    notes += notes_on_stacks(model) + notes_on_kept(kept)
    for rotation in rotations_of(config):
        # a loader can be read once only, and rotations are learned on the same data
        data = None if data is None else list(batches(data))
        rotated = rotate(
            model,
            rotation,
            data,
            _learned_on(chosen, config),
            progress=progress,
        )
        # rotations may wrap layers, which then have other names
        chosen = rotated.renamed(chosen)
        notes += rotated.notes
    report = TorchReport(specs_of(chosen), kept, notes)
    run = ModuleRun(model, config, dict(chosen), report)
    if data is None or not needs_data(chosen, config):
        quantize_without_data(run, progress)
    else:
        # every process takes its part of the same list, and statistics are merged
        samples = distributed.own_part(list(batches(data)))
        try:
            quantize_with_data(run, samples, progress)
        except NotWalkable as error:
            raise ModelError(
                f"{config.algorithms[0].name} works block by block: {error}"
            ) from error
    report.note_idle(config.algorithms)
    return report


@dataclass
class ModuleRun(QuantizationRun):
    """Quantization of a module in memory, whose layers are replaced in place.

    Attributes:
        quantized: quantized layers that ``place_layers`` puts into the model, by name.
    """

    quantized: dict[str, QuantizedLayer] = field(default_factory=dict)

    def module_names(self) -> list[str]:
        """Return the layers to quantize; other modules stay as they are."""
        return list(self.chosen)

    def hand_over(self, name: str, scales: Scales) -> None:
        """Quantize a layer; ``place_layers`` puts it into the model."""
        # a layer that the data does not reach has left ``chosen``
        if name in self.chosen:
            module, spec = self.chosen[name]
            codes = quantize_data_free(name, self.chosen, self.config, self.report)
            self.quantized[name] = QuantizedLayer(
                module, codes, spec, **scales.of(name)
            )

    def place_layers(self) -> None:
        """Replace the float layers by those of ``hand_over``."""
        put_modules(self.model, self.quantized)

    @contextlib.contextmanager
    def calibrating(self) -> Iterator[None]:
        """Restore the float layers after an error.

        Inside, attention modules expose rotated keys and probabilities; they keep doing so on
        success.
        """
        layers = {name: module for name, (module, _) in self.chosen.items()}
        undo = install_attention_hooks(self.model, self.chosen)
        try:
            yield
        # KeyboardInterrupt as well: the model must stay usable in a notebook
        except BaseException:
            undo()
            put_modules(self.model, layers)
            raise

    def check_blocks(self, blocks: Mapping[str, Any]) -> None:
        """Raise NotWalkable if one run of the whole model is simpler, or blocks share a layer."""
        outside = outside_of(self.chosen, blocks)
        # one run of the whole model measures all scales, and keeps no hidden states
        if measures(outside) and not self.config.algorithms:
            raise NotWalkable(
                f"{next(iter(outside))} lies outside of the blocks, and its activations"
                " are measured"
            )
        if shared_among(self.model, blocks, self.chosen):
            raise NotWalkable("two blocks have a layer in common")

    def record(self, blocks: Mapping[str, Any], samples: list[Any]) -> BlockStream:
        """Return the hidden states at the input of the first block."""
        return BlockStream(self.model, blocks, samples)

    def load_whole(self, samples: list[Any], reason: str) -> list[Any]:
        """Log the reason; the weights are in memory."""
        logger.debug("the model is run as a whole: %s", reason)
        return samples

    def after_blocks(
        self,
        scales_before: Mapping[str, Scales],
        scales_after: Mapping[str, Scales],
        samples: list[Any],
        progress: bool | None,
    ) -> None:
        """Replace the layers around the blocks, and run the algorithms on the full model."""
        for name, scales in {**scales_before, **scales_after}.items():
            self.hand_over(name, scales)
        self.place_layers()
        self.run_finalizers(samples, progress)


def check_ranks(config: TorchConfig) -> None:
    """Raise ConfigError for an algorithm that cannot learn from sums over processes.

    Args:
        config: the quantization configuration; every algorithm passes in a single process.
    """
    for algorithm in config.algorithms:
        # algorithms whose statistics add up are merged over processes
        if distributed.count() > 1 and not getattr(algorithm, "sums", True):
            raise ConfigError(
                f"{algorithm.name} needs all samples at once; run it in one process",
            )


def _learned_on(chosen: Layers, config: TorchConfig) -> Layers:
    """Return the specs with which rotations are learned.

    Only activations are quantized if an algorithm chooses weight codes, since the algorithm
    compensates the weight error (SpinQuant, section 4.2).
    """
    if not weight_algorithms(config):
        return chosen
    # without activations nothing would be left to learn from
    if all(spec.input is None for _, spec in chosen.values()):
        return chosen
    return {
        name: (module, spec.with_(weight=None))
        for name, (module, spec) in chosen.items()
    }


def _check_float(model: nn.Module) -> None:
    """Raise ModelError if a model is quantized, a layer alone, or without weights."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            raise ModelError(
                f"{name or 'the model'} is quantized already; start from the float model",
            )
    if kind_of(model) is not None:
        raise ModelError(
            f"the model is a single {type(model).__name__}; put it into a module, as"
            " nn.Sequential(model)",
        )
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ModelError(
                f"{name} holds no numbers: it was not loaded, or is offloaded; load the"
                " model onto devices, or quantize its folder file to file (quark-onnx llm"
                " ptq), which takes less memory",
            )
