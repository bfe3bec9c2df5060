"""Quantization of a block: calibrate layers, run algorithms, replace layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from quark_onnx.torch.algorithms.base import BlockJob, Chosen, Outcome
from quark_onnx.torch.calibration.block_stream import BlockStream, NotWalkable
from quark_onnx.torch.calibration.observers import ActivationObservers
from quark_onnx.torch.config.algorithm_order import STAGES, at_stage
from quark_onnx.torch.config.number_formats import TwoLevel
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.quantized_tensor import (
    Quantized,
    global_scale_of,
    quantize,
)
from quark_onnx.torch.models.fused_groups import fused_group_of
from quark_onnx.torch.models.names import within
from quark_onnx.torch.models.quantized_layer import (
    Layers,
    QuantizedLayer,
    kind_of,
    outputs_first,
)
from quark_onnx.torch.models.structure import put_modules, shared_parameter
from quark_onnx.torch.pipelines.report import TorchReport

if TYPE_CHECKING:
    import torch
    from torch import nn


def quantize_block(  # noqa: PLR0913
    model: nn.Module,
    name: str,
    layers: Layers,
    stream: BlockStream,
    config: TorchConfig,
    report: TorchReport,
) -> Iterator[int]:
    """Quantize one block, and advance the hidden states to the next.

    Activation scales are calibrated on the float model, as in AMD Quark. Algorithms that choose
    codes also see the quantization error of the preceding blocks.

    Args:
        model: the model.
        name: the name of the block.
        layers: the layers of the block that are quantized.
        stream: the hidden states of all samples.
        config: the quantization configuration.
        report: the report, to which outcomes are added.

    Yields:
        The number of samples that the block has processed.
    """
    block = model.get_submodule(name)
    rounders = weight_algorithms(config)
    # without a float reference, the stream has only the hidden states of the quantized model
    if rounders and stream.quantized is None:
        job = BlockJob(
            name,
            block,
            layers,
            stream.calls(name),
            stream.calls(name),
            known=stream.known,
        )
        job = _job_for(rounders, job)
        codes, outcomes = choose_codes(job, rounders)
        report.outcomes += outcomes
        yield from _run_with_codes(job, codes, stream)
        # without calibration there are no activation scales
        replace_layers(model, layers, ActivationObservers({}), config, report, codes)
        return
    floats = stream.calls(name)
    # algorithms get the inputs of the quantized model, with the error of the blocks before
    calls = stream.calls(name, quantized=True) if rounders else floats
    job = BlockJob(name, block, layers, floats, calls, known=stream.known)
    outcomes = list[Outcome]()
    for transform in transforms_of(config):
        outcomes += transform(job)
    # After the transforms, which change the inputs of layers, and before any rounding.
    with ActivationObservers(layers) as observers:
        yield from stream.run(name, block)
    codes = dict[str, Quantized]()
    if rounders:
        # the run above has replaced the inputs by the outputs of the float block
        job.targets = stream.hidden[: len(floats)]
        job.scales = observers.scales(config.least_of)
        job = _job_for(rounders, job)
        codes, rounding_outcomes = choose_codes(job, rounders)
        outcomes += rounding_outcomes
        # progress counts the float run alone, so that a sample counts once
        for _ in _run_with_codes(job, codes, stream, quantized=True):
            pass
    report.outcomes += outcomes
    replace_layers(model, layers, observers, config, report, codes)


def _job_for(rounders: list[Any], job: BlockJob) -> BlockJob:
    """Return the job, with float activations if no algorithm rounds activations."""
    if any(map(attrgetter("rounds_activations"), rounders)):
        return job
    return job.with_float_activations()


def _run_with_codes(
    job: BlockJob,
    codes: Mapping[str, Quantized],
    stream: BlockStream,
    quantized: bool = False,
) -> Iterator[int]:
    """Run the block with given codes, to advance the hidden states of the quantized model.

    Args:
        job: the job of the block; its replay is removed, to free the cached outputs.
        codes: codes by layer name.
        stream: the hidden states, which are replaced by the outputs of the block.
        quantized: whether to advance the quantized hidden states, next to the float ones.

    Yields:
        The number of samples that the block has processed.
    """
    # An algorithm that has computed outputs with its last codes saves another run of the block. The
    # outputs are freed after this run.
    replay, job.replay = job.replay, None
    if replay is not None:
        yield from stream.run(job.name, job.block, quantized, replay.result)
        return
    # for this run alone; ``replace_layers`` replaces the layers for good
    with job.put(job.quantized(codes)):
        yield from stream.run(job.name, job.block, quantized)


def check_unshared(
    model: nn.Module, blocks: Mapping[str, Any], config: TorchConfig
) -> None:
    """Raise NotWalkable if the algorithms cannot work on the blocks.

    An algorithm that rewrites weights needs blocks without parameters that other modules share. All
    block-wise algorithms need blocks that contain layers and are not layers themselves.

    Args:
        model: the model.
        blocks: the blocks by name.
        config: the quantization configuration.

    Raises:
        NotWalkable: a block is a single layer and an algorithm works block by block, or a block
            shares a parameter with another module and an algorithm rewrites blocks.
    """
    # a block that is a layer cannot be replaced by a quantized layer inside of the block
    bare = next((name for name in blocks if kind_of(blocks[name]) is not None), None)
    blockwise = at_stage(config.algorithms, *STAGES[1:])
    if bare is not None and blockwise:
        raise NotWalkable(
            f"{bare} is a {type(blocks[bare]).__name__} alone, and no block of layers",
        )
    name = shared_parameter(model, blocks)
    rewriting = transforms_of(config)
    if rewriting and name is not None:
        raise NotWalkable(
            f"{name} is a parameter of something outside of its block, too, which"
            f" {rewriting[0].name} would change with it; give each its own, or leave the"
            " algorithm out",
        )


def weight_algorithms(config: TorchConfig) -> list[Any]:
    """Return the algorithms that choose integer codes."""
    return at_stage(config.algorithms, "weights")


def transforms_of(config: TorchConfig) -> list[Any]:
    """Return the algorithms that rewrite blocks."""
    return at_stage(config.algorithms, "block")


def needs_float_reference(layers: Layers, config: TorchConfig) -> bool:
    """Return whether float hidden states are needed next to the quantized ones.

    Calibration of activation scales, algorithms with float targets, and algorithms that rewrite
    float blocks need them.
    """
    rounders = weight_algorithms(config)
    if not rounders:
        return False
    # scales are measured on the float model
    if transforms_of(config) or measures(layers):
        return True
    return any(map(attrgetter("aims_at_float"), rounders))


def rotations_of(config: TorchConfig) -> list[Any]:
    """Return the algorithms that rewrite the full model."""
    return at_stage(config.algorithms, "model")


def finalizers(config: TorchConfig) -> list[Any]:
    """Return the algorithms that run on the full model after quantization."""
    return at_stage(config.algorithms, "end")


def choose_codes(
    job: BlockJob,
    rounders: list[Any],
) -> Chosen:
    """Round the weights of a block to nearest, and apply algorithms in sequence.

    Args:
        job: the job of the block.
        rounders: the algorithms that choose integer codes, in the order of application.

    Returns:
        The codes by layer name, without layers whose weight stays float, and the outcomes of all
        algorithms.
    """
    codes = dict[str, Quantized]()
    for name in job.layers:
        weight = rounded_weight(name, job.layers)
        if weight is not None:
            codes[name] = weight
    return apply_weight_algorithms(codes, job, rounders)


def apply_weight_algorithms(
    codes: dict[str, Quantized],
    job: BlockJob,
    rounders: list[Any],
) -> Chosen:
    """Apply algorithms in sequence to codes that are rounded to nearest.

    Args:
        codes: initial codes by layer name.
        job: the job of the block. Its replay becomes that of the last algorithm, if the algorithm
            ran on the same layer specs, else None.
        rounders: the algorithms, in the order of application; each improves on the codes of the
            preceding one.

    Returns:
        The codes by layer name after the last algorithm, and the outcomes of all algorithms.
    """
    outcomes: list[Outcome] = []
    for rounder in rounders:
        rounder_job = job
        if not rounder.rounds_activations:
            rounder_job = job.with_float_activations()
        # outputs with the codes of the preceding algorithm are stale
        rounder_job.replay = None
        codes, rounder_outcomes = rounder(rounder_job, codes)
        outcomes += rounder_outcomes
        # valid only if the algorithm ran with the same activation specs
        job.replay = rounder_job.replay if rounder_job.layers is job.layers else None
    return codes, outcomes


def rounded_weight(
    name: str,
    layers: Layers,
    read: Callable[[str], Any] | None = None,
) -> Quantized | None:
    """Round a layer's weight to nearest.

    A layer of a quantized checkpoint that has the format already keeps its codes.

    Args:
        name: the name of the layer.
        layers: this layer and its fused layers.
        read: reads the weights of fused layers whose modules are empty, by name; None reads those
            of the modules.

    Returns:
        The codes; None if the weight stays float.
    """
    module, spec = layers[name]
    if spec.weight is None:
        return None
    # codes of a quantized checkpoint: rounding the dequantized weight again could change them
    kept: Quantized | None = getattr(module, "kept_codes", None)
    if kept is not None:
        return kept
    weight = outputs_first(module.weight.detach(), kind_of(module))
    whole = None
    # the other formats have no second scale that fused layers would share
    if isinstance(spec.weight.dtype, TwoLevel):
        whole = global_scale_of(_fused_weights(name, layers, read))
    return quantize(weight, spec.weight, name, whole=whole)


def _fused_weights(
    name: str,
    layers: Layers,
    read: Callable[[str], Any] | None,
) -> Iterator[torch.Tensor]:
    """Yield the weights of a layer's fused layers, one at a time, as each may be read from a file.

    The arguments are those of ``rounded_weight``.
    """
    for member in fused_group_of(name, layers):
        # layers of the group with another format are not fused with this one
        if layers[member][1].weight != layers[name][1].weight:
            continue
        if read is None:
            yield layers[member][0].weight.detach()
        else:
            yield read(member)


def quantize_data_free(
    name: str,
    layers: Layers,
    config: TorchConfig,
    report: TorchReport,
    read: Callable[[str], Any] | None = None,
) -> Quantized | None:
    """Quantize a layer's weight with the data-free algorithms.

    Args:
        name: the name of the layer.
        layers: this layer and its fused layers.
        config: the quantization configuration; its algorithms are called without samples.
        report: the report, to which outcomes of algorithms are added.
        read: reads the weights of fused layers whose modules are empty, by layer name; None reads
            the weights of the modules.

    Returns:
        The codes; None if the weight stays float.
    """
    rounders = weight_algorithms(config)
    weight = rounded_weight(name, layers, read)
    if weight is None or not rounders:
        return weight
    # a block of one layer without calls: data-free algorithms read nothing else
    job = BlockJob(name, layers[name][0], {name: layers[name]}, (), ())
    codes, outcomes = apply_weight_algorithms({name: weight}, job, rounders)
    report.outcomes += outcomes
    return codes[name]


def replace_layers(  # noqa: PLR0913
    model: nn.Module,
    layers: Layers,
    observers: ActivationObservers,
    config: TorchConfig,
    report: TorchReport,
    codes: Mapping[str, Quantized],
) -> None:
    """Replace the observed layers by quantized layers in the model.

    Args:
        model: the model.
        layers: the observed layers.
        observers: their observers.
        config: the quantization configuration.
        report: the report.
        codes: codes that algorithms have chosen; all other weights are rounded to nearest.
    """
    quantized_layers = dict[str, Any]()
    scales = observers.scales(config.least_of)
    report.note_borrowing(observers.borrowing)
    for name, (module, spec) in layers.items():
        if observers.unseen(name, scales):
            # the data has not reached the layer: its activations have no scale
            spec = report.weight_only(name)
        weight = codes.get(name) or rounded_weight(name, layers)
        quantized_layers[name] = QuantizedLayer(module, weight, spec, **scales.of(name))
    put_modules(model, quantized_layers)


def layers_in(layers: Layers, block: str) -> dict[str, tuple[Any, LayerSpec]]:
    """Return the layers of a block.

    Args:
        layers: layers of the model.
        block: name of the block.

    Returns:
        The layers by their full names; empty if the block has no layer to quantize.
    """
    return {name: entry for name, entry in layers.items() if within(name, block)}


def measures(layers: Layers) -> bool:
    """Return whether a scale needs calibration data."""
    return any(spec.measures for _, spec in layers.values())


def needs_data(layers: Layers, config: TorchConfig) -> bool:
    """Return whether quantization has to run the model."""
    return measures(layers) or any(map(attrgetter("needs_data"), config.algorithms))


def missing_data(layers: Layers) -> str:
    """Return the error message for missing calibration data."""
    what = "an algorithm learns from data"
    if measures(layers):
        what = "scales of activations are to be found"
    return f"{what}, but no calibration data was given"


def specs_of(layers: Layers) -> dict[str, LayerSpec]:
    """Return the specs of layers by name."""
    return {name: spec for name, (_, spec) in layers.items()}
