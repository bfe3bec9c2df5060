"""Blocks of small random models, and what they are called with."""

from __future__ import annotations

from typing import Any

import torch

from quark_onnx.torch.algorithms.base import BlockJob
from quark_onnx.torch.calibration.block_stream import BlockStream, inference
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.models.experts import unfuse_experts
from quark_onnx.torch.models.quantized_layer import kind_of
from quark_onnx.torch.models.structure import blocks_of, layers_of
from tests.torch_families import config_of
from tests.torch_models import made, tokens


def model_of(family: str, dtype: Any = torch.float32) -> Any:
    """A model of a family, its experts taken apart, whose norms have gains that matter."""
    model = made(config_of(family), dtype)
    unfuse_experts(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return model


def job_of(model: Any, spec: LayerSpec, place: int = -1, count: int = 3) -> BlockJob:
    """The block at a place of a model, with what it is called with in the float model."""
    blocks = blocks_of(model)
    wanted = list(blocks)[place]
    with inference(model):
        walk = BlockStream(model, blocks, tokens(count, 24))
        for name, block in blocks.items():
            if name == wanted:
                break
            for _ in walk.run(name, block):
                pass
    calls = walk.calls(wanted)
    layers = {
        f"{wanted}.{name}": (module, spec)
        for name, (module, _) in layers_of(blocks[wanted]).items()
        if kind_of(module) in ("Linear", "Conv1D")
    }
    return BlockJob(wanted, blocks[wanted], layers, calls, calls)


def change(job: BlockJob, rewrite: Any) -> float:
    """How much what a block computes differs once it is rewritten, as a share of what it adds to
    what it reads.
    """
    call = job.floats[-1]
    with torch.no_grad():
        before = call.run(job.block).double()
        rewrite()
        after = call.run(job.block).double()
    return float((after - before).norm() / (before - call.hidden).norm())


def inputs_of(job: BlockJob, name: str) -> Any:
    """What a layer of a block reads on all calls: (tokens, inputs), float64."""
    seen: list[Any] = []
    layer = job.layers[f"{job.name}.{name}"][0]
    hook = layer.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].detach().flatten(0, -2).double())
    )
    with torch.no_grad():
        for call in job.calls:
            call.run(job.block)
    hook.remove()
    return torch.cat(seen)
