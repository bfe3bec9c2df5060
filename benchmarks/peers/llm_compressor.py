"""Perplexity of a language model as llm-compressor quantizes it. Executed by the Python of its own virtual environment.

    python llm_compressor.py MODEL WINDOWS.npz SCHEME ALGORITHM

SCHEME is uint4_wo_128, or another of the rows that it has a preset for. The last line printed is JSON, as that of
``amd_quark_llm.py``.
"""

import json
import sys
import time
from importlib.metadata import version

#: Its presets.
SCHEMES = {"uint4_wo_128": "W4A16_ASYM", "int8": "W8A8", "fp8": "FP8", "mxfp4": "MXFP4"}


def main(folder, windows, scheme, algorithm):
    import numpy as np
    import torch
    from amd_quark import peak_mb
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    with np.load(windows) as loaded:
        calibrate, score = loaded["calibrate"], torch.from_numpy(loaded["score"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    modifier = {"gptq": GPTQModifier, "nearest": QuantizationModifier}[algorithm]
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in calibrate]
    start = time.perf_counter()
    oneshot(
        model=model,
        dataset=Dataset.from_list(rows),
        recipe=modifier(targets="Linear", scheme=SCHEMES[scheme], ignore=["lm_head"]),
        max_seq_length=calibrate.shape[1],
        num_calibration_samples=len(calibrate),
    )
    seconds, total = time.perf_counter() - start, 0.0
    with torch.no_grad():
        for part in score.split(8):
            logits = model(input_ids=part).logits[:, :-1].float()
            total += float(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            )
    value = float(np.exp(total / score[:, 1:].numel()))
    print(json.dumps({"value": value, "seconds": seconds, "peak_mb": peak_mb(), "version": version("llmcompressor")}))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}))
