"""Perplexity of a language model as llm-compressor quantizes it.

Executed by the Python of its own virtual environment.

    python llm_compressor.py MODEL WINDOWS.npz SCHEME ALGORITHM

SCHEME is mxfp4, or as uint4_wo_per_channel and uint3_wo_32 are: weights with zero points. ALGORITHM
is nearest, gptq or awq, with its defaults. The last line printed is JSON, as that of
``amd_quark_llm.py``.
"""

import time
from importlib.metadata import version

from scored import scored, stand_in_tokenizer, told


def scheme_of(name):
    """Its scheme."""
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationScheme,
        preset_name_to_scheme,
    )

    if name == "mxfp4":
        return preset_name_to_scheme("MXFP4", ["Linear"])
    bits, group = name.removeprefix("uint").split("_wo_")
    strategy = (
        {"strategy": "channel"}
        if group == "per_channel"
        else {"strategy": "group", "group_size": int(group)}
    )
    weights = QuantizationArgs(
        num_bits=int(bits), type="int", symmetric=False, **strategy
    )
    return QuantizationScheme(targets=["Linear"], weights=weights)


def main(folder, windows, scheme, algorithm):
    import numpy as np
    import torch
    from amd_quark import peak_mb
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    with np.load(windows) as loaded:
        calibrate, score = (
            torch.from_numpy(loaded[name]) for name in ("calibrate", "score")
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    groups = {"config_groups": {"all": scheme_of(scheme)}, "ignore": ["lm_head"]}
    rounder = GPTQModifier if algorithm == "gptq" else QuantizationModifier
    recipe = [*([AWQModifier()] if algorithm == "awq" else []), rounder(**groups)]
    rows = [
        {"input_ids": row[None], "attention_mask": torch.ones_like(row[None])}
        for row in calibrate
    ]
    start, cpu = time.perf_counter(), time.process_time()
    oneshot(
        model=model,
        dataset=DataLoader(rows, batch_size=None),
        recipe=recipe,
        processor=stand_in_tokenizer(),
        max_seq_length=calibrate.shape[1],
        num_calibration_samples=len(calibrate),
    )
    found = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mb": peak_mb(),
        "version": version("llmcompressor"),
    }
    return found | scored(model, score, windows)


if __name__ == "__main__":
    told(main)
