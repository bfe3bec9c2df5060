"""quantize_model: replace float layers by quantized ones in memory, block by block."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.common.progress import Progress
from quark_onnx.torch.algorithms.rotation.rotate import rotate
from quark_onnx.torch.calibration.block_stream import (
    BlockStream,
    batches,
    inference,
    run_whole,
)
from quark_onnx.torch.calibration.observers import ActivationObservers
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
from quark_onnx.torch.models.names import within_any
from quark_onnx.torch.models.quantized_layer import (
    Layers,
    QuantizedLayer,
    kind_of,
    unlike_its_base,
)
from quark_onnx.torch.models.structure import (
    blocks_of,
    layers_of,
    put_modules,
    shared_among,
)
from quark_onnx.torch.pipelines.block import (
    check_unshared,
    finalizers,
    finish,
    inside,
    measures,
    missing_data,
    needs_data,
    needs_float_reference,
    quantize_block,
    quantize_data_free,
    rotations_of,
    specs_of,
    weight_algorithms,
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
    found = layers_of(model)
    unfit = _unfit_layers(model)
    for glob in config.named:
        names = matching(dict.fromkeys((*found, *unfit)), glob)
        if names and unfit.keys() >= set(names):
            raise ConfigError(
                f"layers names {glob!r}, but {names[0]} cannot be quantized:"
                f" {unfit[names[0]]}",
            )
    patterns = LayerPatterns(model, found, stored)
    config = with_layer_names(config, patterns, model)
    # names and globs without a layer are errors, mostly typing errors
    config.check(found)
    # a router that the configuration names is quantized like any other layer
    routers = set(routers_of(model))
    routers -= asked_for(config, patterns, routers)
    specs = {name: config.spec_of(name, kind) for name, (_, kind) in found.items()}
    narrow = {
        name for name, spec in specs.items() if not fills_a_group(found[name][0], spec)
    }
    narrow -= asked_for(config, patterns, narrow)
    # later reasons have priority
    reasons = dict.fromkeys(narrow, TOO_NARROW) | unfit
    for name, spec in specs.items():
        if name in routers:
            reasons[name] = ROUTER
        elif not found[name][0].weight.numel():
            # a part of the model that its configuration gives a width of 0
            reasons[name] = EMPTY
        elif spec is None:
            reasons[name] = reason_of(name, config)
    kept = {name: reasons[name] for name in found if name in reasons}
    chosen = {
        name: (found[name][0], spec)
        for name, spec in specs.items()
        if spec is not None and name not in kept
    }
    # matrices that no quantizable layer holds, with the reason
    kept |= other_weights_of(model, found, routers)
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
    for each in rotations_of(config):
        # a loader can be read once only, and rotations are learned on the same data
        data = None if data is None else list(batches(data))
        rotated = rotate(
            model,
            each,
            data,
            _learned_on(chosen, config),
            progress=progress,
        )
        # rotations may wrap layers, which then have other names
        chosen = rotated.renamed(chosen)
        notes += rotated.notes
    report = TorchReport(specs_of(chosen), kept, notes)
    # the model is not run, and layers are independent of each other
    if data is None or not needs_data(chosen, config):
        made = dict[str, Any]()
        with Progress(progress, len(chosen), "quantizing", "layer") as bar:
            for done, (name, (module, spec)) in enumerate(chosen.items(), 1):
                made[name] = QuantizedLayer(
                    module,
                    quantize_data_free(name, chosen, config, report),
                    spec,
                )
                bar.update(done)
        # at the end: an error in a layer leaves the model float
        put_modules(model, made)
        report.note_idle(config.algorithms)
        return report
    # every process takes its part of the same list, and statistics are merged
    data = distributed.own_part(list(batches(data)))
    with inference(model), _float_again(model, chosen):
        if not _walk(model, chosen, data, config, progress, report):
            _whole(model, chosen, data, config, report)
        for each in finalizers(config):
            report.outcomes += each(model, chosen, data, progress)
    report.note_idle(config.algorithms)
    return report


@contextlib.contextmanager
def _float_again(model: nn.Module, layers: Layers) -> Iterator[None]:
    """Restore the float layers after an error.

    Inside, attention modules expose rotated keys and probabilities; they keep doing so on success.
    """
    undo = install_attention_hooks(model, layers)
    try:
        yield
    # KeyboardInterrupt as well: the model must stay usable in a notebook
    except BaseException:
        undo()
        put_modules(model, {name: module for name, (module, _) in layers.items()})
        raise


def check_ranks(config: TorchConfig) -> None:
    """Raise ConfigError for an algorithm that cannot learn from sums over processes.

    Args:
        config: the quantization configuration; every algorithm passes in a single process.
    """
    for each in config.algorithms:
        # algorithms whose statistics add up are merged over processes
        if distributed.count() > 1 and not getattr(each, "sums", True):
            raise ConfigError(
                f"{each.name} needs all samples at once; run it in one process",
            )


def _learned_on(chosen: Layers, config: TorchConfig) -> Layers:
    """Return the specs with which rotations are learned.

    Only activations are quantized if an algorithm chooses weight codes, since the algorithm
    compensates the weight error (SpinQuant, section 4.2).

    Args:
        chosen: the layers to quantize.
        config: the quantization configuration.

    Returns:
        The layers; without weight specs if an algorithm chooses weight codes and any input is
        quantized.
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


def _walk(  # noqa: C901, PLR0913
    model: nn.Module,
    chosen: Layers,
    data: list[Any],
    config: TorchConfig,
    progress: bool | None,
    report: TorchReport,
) -> bool:
    """Quantize block by block, with scales of the float model, as in AMD Quark.

    Returns:
        False if this is impossible: a calibrated layer lies outside of the blocks, or the blocks do
        not run in sequence, once per sample.
    """
    blocks = blocks_of(model)
    parts = {block: inside(chosen, block) for block in blocks}
    in_blocks = {name for part in parts.values() for name in part}
    rest = {name: layer for name, layer in chosen.items() if name not in in_blocks}
    try:
        if not blocks:
            # a fallback for models without algorithms: the handler below returns False
            raise ModelError("the model has no list of blocks")
        if measures(rest) and not config.algorithms:
            raise ModelError(
                f"{next(iter(rest))} lies outside of the blocks, and its activations"
                " are measured",
            )
        if shared_among(model, blocks, chosen):
            raise ModelError("two blocks have a layer in common")
        check_unshared(model, blocks, config)
        # only layers outside of the blocks need the data: one run of the whole model is simpler
        if not config.algorithms and not any(map(measures, parts.values())):
            return False
        with ActivationObservers(rest) as watching:
            if measures(rest):
                run_whole(model, data)
        # outside of the observers: recording skips the blocks, so that layers after them read other
        # values
        walk = BlockStream(model, blocks, data)
        walk.check_once(model)
        if needs_float_reference(chosen, config):
            walk.split()
    except ModelError as error:
        if config.algorithms:
            raise ModelError(
                f"{config.algorithms[0].name} works block by block: {error}",
            ) from error
        # the scales are the same; block by block needs less memory
        logger.debug("the model is run as a whole: %s", error)
        return False
    with Progress(progress, len(blocks), "quantizing", "block") as bar:
        for index, name in enumerate(blocks):
            for done in quantize_block(model, name, parts[name], walk, config, report):
                # one more than the samples: codes are chosen after the last of them
                bar.update(index + done / (len(walk) + 1))
            bar.update(index + 1)
    # layers that no sample reached stay float, before any of them is rounded
    rest = _reached(model, rest, watching, config, report)
    report.note_outside(rest, config.algorithms)
    alone = {name: quantize_data_free(name, rest, config, report) for name in rest}
    finish(
        model,
        rest,
        watching,
        config,
        report,
        {key: value for key, value in alone.items() if value is not None},
    )
    return True


def _whole(
    model: nn.Module,
    layers: Layers,
    data: list[Any],
    config: TorchConfig,
    report: TorchReport,
) -> None:
    """Quantize layers of a model that cannot run block by block.

    Args:
        model: the model; its layers are replaced.
        data: the calibration batches.
        config: the quantization configuration.
        report: the report, for notes on layers that the data did not reach.
    """
    with ActivationObservers(layers) as watching:
        run_whole(model, data)
    finish(
        model,
        _reached(model, layers, watching, config, report),
        watching,
        config,
        report,
    )


def _reached(
    model: nn.Module,
    layers: Layers,
    watching: ActivationObservers,
    config: TorchConfig,
    report: TorchReport,
) -> dict[str, tuple[Any, LayerSpec]]:
    """Return the layers to quantize, without inactive layers outside of the blocks.

    Layers that the calibration data does not activate have no activation scales. Outside of the
    blocks they stay float.

    Args:
        layers: the observed layers.
        watching: their observers, after the run.
        config: the quantization configuration.
        report: the report, to which layers that stay float are added.

    Returns:
        A new dict of layers. Inactive layers within blocks, and all layers of a model without
        blocks, are kept.
    """
    blocks, scales = blocks_of(model), watching.scales(config.least_of)
    found = dict(layers)
    # ``finish`` quantizes the weight alone, within blocks and in a model without blocks
    if not blocks:
        return found
    for name in layers:
        if watching.unseen(name, scales) and not within_any(name, blocks):
            report.stay_float(name)
            del found[name]
    return found
