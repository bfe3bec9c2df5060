"""Quantizes a small model in each process of torch.distributed, and saves what became of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests import torch_families
from tests.torch_models import made, tokens


def quantized(
    family: str, name: str, algorithms: str, batches: str = "5"
) -> dict[str, Any]:
    """What is left of the weights, and the scales of what layers read.

    Args:
        batches: the number of windows, one a batch; "one" for four windows in a single batch of
            keyword arguments.
    """
    model = made(torch_families.config_of(family))
    config = TorchConfig(
        scheme(name), exclude=("lm_head",), algorithms=tuple(algorithms.split("+"))
    )
    data: list[Any]
    if batches == "one":
        data = [{"input_ids": torch.cat(tokens(4))}]
    else:
        data = tokens(int(batches))
    quantize_model(model, data, config, progress=False)
    layers = {
        key: each
        for key, each in model.named_modules()
        if isinstance(each, QuantizedLayer)
    }
    found = {key: each.weight.contiguous() for key, each in layers.items()}
    scales = {
        key: each.input.scale for key, each in layers.items() if each.input is not None
    }
    return found | {
        f"{key} scale": scale for key, scale in scales.items() if scale is not None
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, *what = sys.argv[1:]
    torch.save(quantized(*what), Path(folder) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
