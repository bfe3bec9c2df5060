# %% [markdown]
# # A BERT classifier
#
# Transformers have outlier channels: a few activations are much larger than the others, and one
# scale serves them badly. This tutorial quantizes a small BERT that classifies sentences,
# without calibration data first, then with. It needs `pip install quark-onnx`.

# %%
from pathlib import Path

import numpy as np
import onnxruntime as ort

from quark_onnx import QConfig, compare, quantize_dynamic, quantize_static

DATA = Path("data") if Path("data").exists() else Path("examples/tutorials/data")
OUT = Path("out/tutorials")
OUT.mkdir(parents=True, exist_ok=True)
MODEL = DATA / "bert.onnx"

# %% [markdown]
# ## Token ids
#
# Encoders read token ids and a mask. With a tokenizer of transformers, a sample is
# `dict(tokenizer(text, padding="max_length", return_tensors="np"))`. Here the ids are stored.
# Padding to the length of production matters: ranges depend on it.

# %%
arrays = np.load(DATA / "bert.npz")
inputs = {"input_ids": arrays["input_ids"], "attention_mask": arrays["mask"]}
labels = arrays["labels"]


def batches(start: int, stop: int, size: int = 8) -> list[dict[str, np.ndarray]]:
    """Return samples of several sentences each."""
    return [
        {name: array[row : row + size] for name, array in inputs.items()}
        for row in range(start, stop, size)
    ]


calibration, test = batches(0, 200), batches(200, 600)


def accuracy(model: Path) -> float:
    """Return the share of test sentences with the right label."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    logits = np.concatenate([session.run(None, batch)[0] for batch in test])
    return float((logits.argmax(axis=1) == labels[200:]).mean())


print(f"float: {100 * accuracy(MODEL):.1f} %, {MODEL.stat().st_size:,} bytes")

# %% [markdown]
# ## Without data
#
# Dynamic quantization computes the scales of activations in each run. It needs no data, and
# suits MatMul.

# %%
quantize_dynamic(MODEL, output=OUT / "bert_dynamic.onnx")
print(f"dynamic: {100 * accuracy(OUT / 'bert_dynamic.onnx'):.1f} %")

# %% [markdown]
# ## With data
#
# Static quantization fixes the scales. Residual streams around LayerNorm and attention masks
# stay float. SmoothQuant moves outliers from activations into weights; this model normalizes
# after its sums, so `insert=true` is needed.

# %%
for name, config in {
    "A8W8": QConfig.of("A8W8"),
    "A8W8, SmoothQuant": QConfig.of("A8W8").with_(
        optimizers=("smoothquant:insert=true",)
    ),
}.items():
    output = OUT / "bert_static.onnx"
    quantize_static(MODEL, calibration, config, output)
    sqnr = compare(MODEL, output, test).sqnr
    print(f"{name:18} {100 * accuracy(output):.1f} %, {sqnr:.1f} dB")

# %% [markdown]
# On the command line, with one `.npz` file per sample whose keys are `input_ids` and
# `attention_mask`:
#
#     quark-onnx quantize bert.onnx -o bert_int8.onnx --data samples/ --optimize smoothquant:insert=true
#     quark-onnx quantize bert.onnx -o bert_int8.onnx --dynamic
