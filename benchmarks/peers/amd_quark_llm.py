"""Perplexity of a language model as amd-quark quantizes it.

Executed by the Python of its own virtual environment.

    python amd_quark_llm.py MODEL WINDOWS.npz SCHEME [ALGORITHM ...] [--kv]

WINDOWS.npz holds token ids of shape (windows, length): ``calibrate`` and ``score``. ``--kv``
quantizes keys and values to FP8. The last line printed is JSON: what ``scored`` says of it, the
seconds that quantize_model took, the peak resident memory in MB until then, the version; or the
error.
"""

import os
import time
from importlib.metadata import version

from scored import scored, told

os.environ["QUARK_DISABLE_COMPILE"] = "1"


def main(folder, windows, scheme, *algorithm):
    import numpy as np
    import torch
    from amd_quark import peak_mb
    from quark.torch import LLMTemplate, ModelQuantizer
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    with np.load(windows) as loaded:
        calibrate, score = (
            torch.from_numpy(loaded[name]) for name in ("calibrate", "score")
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cache = "fp8" if "--kv" in algorithm else None
    names = [name for name in algorithm if name != "--kv"]
    config = LLMTemplate.get("llama").get_config(
        scheme=scheme, algorithm=names or None, kv_cache_scheme=cache
    )
    start = time.perf_counter()
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(
        quantizer.quantize_model(model, DataLoader(calibrate, batch_size=1))
    )
    found = {
        "seconds": time.perf_counter() - start,
        "peak_mb": peak_mb(),
        "version": version("amd-quark"),
    }
    return found | scored(model, score, windows)


if __name__ == "__main__":
    told(main)
