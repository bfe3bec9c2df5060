"""Blocks: the layers of one become quantized layers, by what data and algorithms tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quark_onnx.errors import ModelError
from quark_onnx.torch.algorithms.base import BlockJob, Layers, Outcome
from quark_onnx.torch.config import TorchConfig
from quark_onnx.torch.layers import QuantizedLayer, kind_of, outputs_first
from quark_onnx.torch.observe import Watching
from quark_onnx.torch.quantized import Quantized, quantize
from quark_onnx.torch.report import TorchReport
from quark_onnx.torch.spec import LayerSpec
from quark_onnx.torch.structure import put_modules, shared_parameter, within
from quark_onnx.torch.walk import Walk


def quantize_block(
    model: Any, name: str, layers: Layers, walk: Walk, config: TorchConfig, report: TorchReport
) -> Iterator[int]:
    """Quantize one block, and bring the hidden states behind it; say after each sample how many the block has seen.

    Scales of activations are those of the float model, as AMD Quark's are; where an algorithm chooses codes, it knows
    what the quantized blocks before have left, too.

    Args:
        model: the model.
        name: of the block.
        layers: those of its layers that are quantized.
    """
    block = model.get_submodule(name)
    rounders = rounders_of(config)
    if rounders and walk.quantized is None:
        job = BlockJob(name, block, layers, walk.calls(name), walk.calls(name))
        made, outcomes = refined(job, rounders)
        report.outcomes += outcomes
        with job.put(job.quantized(made)):
            yield from walk.run(name, block)
        finish(model, layers, Watching({}), config, report, made)
        return
    floats = walk.calls(name)
    job = BlockJob(name, block, layers, floats, walk.calls(name, quantized=True) if rounders else floats)
    outcomes = [found for transform in transforms_of(config) for found in transform(job)]
    with Watching(layers) as watching:
        yield from walk.run(name, block)
    made = dict[str, Quantized]()
    if rounders:
        job.targets = walk.hidden[: len(floats)]
        job.inputs, job.outputs = watching.scales(_least(config))
        made, found = refined(job, rounders)
        outcomes += found
        with job.put(job.quantized(made)):
            for _ in walk.run(name, block, quantized=True):
                pass
    report.outcomes += outcomes
    finish(model, layers, watching, config, report, made)


def check_apart(model: Any, blocks: Mapping[str, Any], config: TorchConfig) -> None:
    """Raise ModelError where an algorithm rewrites weights of a block that are those of something else, too, or where
    blocks are layers themselves, so that there is nothing to take apart."""
    bare = next((name for name, block in blocks.items() if kind_of(block) is not None), None)
    if bare is not None and any(each.stage != "model" for each in config.algorithms):
        raise ModelError(f"{bare} is a {type(blocks[bare]).__name__} alone, and no block of layers")
    name = shared_parameter(model, blocks)
    rewriting = next((each.name for each in config.algorithms if each.stage == "block"), None)
    if rewriting is not None and name is not None:
        raise ModelError(
            f"{name} is a parameter of something outside of its block, too, which {rewriting} would change with it; "
            "give each its own, or leave the algorithm out"
        )


def rounders_of(config: TorchConfig) -> list[Any]:
    """The algorithms that choose codes."""
    return [each for each in config.algorithms if each.stage == "weights"]


def transforms_of(config: TorchConfig) -> list[Any]:
    """The algorithms that rewrite blocks."""
    return [each for each in config.algorithms if each.stage == "block"]


def has_two_streams(layers: Layers, config: TorchConfig) -> bool:
    """Whether what the float model computes is to be known beside what quantized blocks leave: for scales of
    activations, for algorithms that aim at it, and for those that rewrite float blocks."""
    rounders = rounders_of(config)
    aimed = bool(transforms_of(config)) or measures(layers) or any(each.aims_at_float for each in rounders)
    return bool(rounders) and aimed


def rotations_of(config: TorchConfig) -> list[Any]:
    """The algorithms that rewrite a whole model."""
    return [each for each in config.algorithms if each.stage == "model"]


def refined(job: BlockJob, rounders: list[Any]) -> tuple[dict[str, Quantized], list[Outcome]]:
    """The codes of a block's weights as algorithms leave them, one after the other."""
    made = {name: quantize(weight, spec.weight, name) for name, weight, spec in job.weights() if spec.weight}
    outcomes: list[Outcome] = []
    for rounder in rounders:
        made, found = rounder(job, made)
        outcomes += found
    return made, outcomes


def weight_of(module: Any, spec: LayerSpec, name: str) -> Quantized | None:
    """The codes of a layer's weight, each rounded to the nearest; None where it stays float."""
    if spec.weight is None:
        return None
    return quantize(outputs_first(module.weight.detach(), kind_of(module)), spec.weight, name)


def weight_alone(name: str, module: Any, spec: LayerSpec, config: TorchConfig, report: TorchReport) -> Quantized | None:
    """The codes of a layer's weight, as algorithms choose them that need no data."""
    made, outcomes = refined(BlockJob(name, module, {name: (module, spec)}, (), ()), rounders_of(config))
    report.outcomes += outcomes
    return made.get(name)


def finish(
    model: Any,
    layers: Layers,
    watching: Watching,
    config: TorchConfig,
    report: TorchReport,
    made: Mapping[str, Quantized] | None = None,
) -> None:
    """Put quantized layers in the place of those that were watched.

    Args:
        made: codes of weights that algorithms have chosen; all others are rounded to the nearest.
    """
    made = made or {}
    layered = dict[str, Any]()
    inputs, outputs = watching.scales(_least(config))
    for name, (module, spec) in layers.items():
        read, computed = inputs.get(name), outputs.get(name)
        if (name in watching.inputs and read is None) or (name in watching.outputs and computed is None):
            spec = report.weight_only(name)
        weight = made.get(name)
        layered[name] = QuantizedLayer(module, weight or weight_of(module, spec, name), spec, read, computed)
    put_modules(model, layered)


def _least(config: TorchConfig) -> float:
    return config.kv_cache.least if config.kv_cache else 0.0


def inside(layers: Layers, block: str) -> dict[str, tuple[Any, LayerSpec]]:
    """Those of the layers that are part of a block."""
    return {name: entry for name, entry in layers.items() if within(name, block)}


def measures(layers: Layers) -> bool:
    """Whether there are scales that only data can tell."""
    return any(spec.measures for _, spec in layers.values())


def needs_data(layers: Layers, config: TorchConfig) -> bool:
    """Whether the model has to be run."""
    return measures(layers) or any(algorithm.needs_data for algorithm in config.algorithms)


def missing_data(layers: Layers) -> str:
    """The message for a user who has given no data."""
    what = "scales of activations are to be found" if measures(layers) else "an algorithm learns from data"
    return f"{what}, but no calibration data was given"
