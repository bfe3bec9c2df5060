"""Perplexity of a language model as GPTQModel quantizes it.

Executed by the Python of its own virtual environment.

    python gptq_model.py MODEL WINDOWS.npz SCHEME ALGORITHM

SCHEME is one as uint4_wo_per_channel and uint3_wo_32 are: weights with zero points. ALGORITHM is
gptq or gptaq, with its defaults. The last line printed is JSON, as that of ``amd_quark_llm.py``.
"""

import os
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from scored import scored, stand_in_tokenizer, told

#: It wants two threads to load with, and has one on a machine with two processors.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")


def main(folder, windows, scheme, algorithm):
    import numpy as np
    import torch
    from amd_quark import peak_mb

    os.chdir(gettempdir())  # it leaves logs where it is started
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig, __version__
    from gptqmodel.quantization import GPTAQConfig
    from transformers import AutoModelForCausalLM

    with np.load(windows) as loaded:
        calibrate, score = (
            torch.from_numpy(loaded[name]) for name in ("calibrate", "score")
        )
    bits, group = scheme.removeprefix("uint").split("_wo_")
    config = QuantizeConfig(
        bits=int(bits),
        group_size=-1 if group == "per_channel" else int(group),
        sym=False,
        device="cpu",
        act_group_aware=group
        != "per_channel",  # a default that it refuses without groups
        gptaq=GPTAQConfig() if algorithm == "gptaq" else None,
        offload_to_disk=False,
    )
    with TemporaryDirectory() as place:
        copied = shutil.copytree(folder, Path(place) / "model")
        stand_in_tokenizer().save_pretrained(copied)
        model = GPTQModel.load(str(copied), config, dtype=torch.float32)
        rows = [
            {"input_ids": row[None], "attention_mask": torch.ones_like(row[None])}
            for row in calibrate
        ]
        start = time.perf_counter()
        model.quantize(rows, batch_size=8, backend=BACKEND.TORCH)
        found = {
            "seconds": time.perf_counter() - start,
            "peak_mb": peak_mb(),
            "version": __version__,
        }
        # zero points are what it means by them once they have been read
        model.save(f"{place}/result")
        model = GPTQModel.load(f"{place}/result", device="cpu", backend=BACKEND.TORCH)
    # in float32, whatever its layers compute in
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, layer in model.model.named_modules():
        if hasattr(layer, "dequantize_weight"):
            plain.get_submodule(name).weight.data = (
                layer.dequantize_weight().t().float()
            )
    return found | scored(plain, score, windows)


if __name__ == "__main__":
    told(main)
    os._exit(0)  # threads of its own go on
