"""Quantizes a small model by each algorithm, and prints a digest of each result as JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch

from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.torch_models import VOCABULARY, llama, made


def digest(model: Any) -> str:
    """Return a digest of all tensors of a model."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def quantized(name: str, algorithms: list[str]) -> str:
    """Return the digest of a model whose weights and inputs have more than 32,768 elements.

    torch splits the sum of as many elements over its threads.
    """
    settings = {
        "hidden_size": 256,
        "intermediate_size": 320,
        "max_position_embeddings": 128,
    }
    model = made(llama(**settings))
    generator = torch.Generator().manual_seed(7)
    batch = torch.randint(0, VOCABULARY, (4, 128), generator=generator)
    config = TorchConfig(scheme(name), exclude=("lm_head",), algorithms=algorithms)
    quantize_model(model, batch.split(2), config, progress=False)
    return digest(model)


if __name__ == "__main__":
    runs = json.loads(sys.argv[1])
    torch.set_num_threads(int(sys.argv[2]))
    result = {"threads": torch.get_num_threads()}
    for run in runs:
        scheme_name, *names = run
        result["+".join(run)] = quantized(scheme_name, names)
    print(json.dumps(result))
