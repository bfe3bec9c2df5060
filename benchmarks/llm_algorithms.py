"""Perplexity of language models with the algorithms for low bits, ours beside those of other tools in the same run.

    QUARK_ONNX_DATA=... python benchmarks/llm_algorithms.py [--models stories260K mixtext] [--rows uint4 mxfp4 ...]
        [--algorithms gptq awq ...] [--amd-quark-python PYTHON] [--llm-compressor-python PYTHON] [--busy]

All tools get the same windows of tokens: those that calibrate, and those that are scored (llm/README.md of the data
has the protocol: windows of 256 tokens, float32). Each run is a process of its own, so that its peak memory is its own.
What an algorithm gives is ours first, then theirs; the best of ours and the best of theirs are compared in the last two
columns, and a star marks a row where ours is worse by more than a thousandth, or GPTQ worse than rounding to nearest;
the exit code is then 1.
"""

from __future__ import annotations

import json
import time

import numpy as np

#: Rows: ours, and what amd-quark calls the same.
ROWS = {
    "uint4_wo_per_channel": "uint4_wo_per_channel",
    "uint4_wo_32": "uint4_wo_32",
    "uint4_wo_128": "uint4_wo_128",
    "uint3_wo_32": None,
    "uint2_wo_32": None,
    "uint2_wo_128": None,
    "int8": "int8",
    "uint4_int8": None,
    "mxfp4": "mxfp4",
    "fp8+kv": "fp8",
}
#: Ours, by what the table calls them.
ALGORITHMS = {
    "nearest": (),
    "gptq": ("gptq",),
    "gptaq": ("gptaq",),
    "qronos": ("qronos",),
}
#: What amd-quark has of the same name.
THEIRS = ("nearest", "gptq", "gptaq", "qronos", "awq")


def child(folder: str, windows: str, row: str, *algorithms: str) -> None:
    """Quantize and score in this process, and print what was found."""
    import torch
    from peers.amd_quark import peak_mb
    from transformers import AutoModelForCausalLM

    from quark_onnx.torch.perplexity import perplexity
    from quark_onnx.torch.ptq import config_for
    from quark_onnx.torch.quantize import quantize_model

    with np.load(windows) as loaded:
        calibrate, score = (torch.from_numpy(loaded[name]) for name in ("calibrate", "score"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    start = time.perf_counter()
    if row != "float":
        name, _, cache = row.partition("+")
        config = config_for(name, kv_cache="fp8" if cache else None).with_(algorithms=algorithms)
        quantize_model(model, config, calibrate.split(1), progress=False)
    seconds = time.perf_counter() - start
    value = perplexity(model, list(score), progress=False)
    print(json.dumps({"value": value, "seconds": seconds, "peak_mb": peak_mb()}))
