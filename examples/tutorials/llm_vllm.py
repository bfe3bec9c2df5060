# %% [markdown]
# # A language model for vLLM
#
# This tutorial quantizes the weights of a language model to 4 bits, compares perplexity before
# and after, and checks that vLLM loads the checkpoint. It needs `pip install
# '.[cpu,llm]'`. The model is a small Llama that `tiny_llama.py` trains in seconds; replace
# `FOLDER` by a folder of Hugging Face, and the rest stays the same.

# %%
import shutil
import sys
from pathlib import Path

HERE = Path("examples/tutorials") if Path("examples/tutorials").exists() else Path()
sys.path.insert(0, str(HERE))

import tiny_llama

from quark_onnx.torch import Text, config_for, ptq, validate_checkpoint

OUT = Path("out/tutorials/llm")
shutil.rmtree(OUT, ignore_errors=True)
FOLDER = OUT / "llama"
tiny_llama.make(FOLDER)

# %% [markdown]
# ## Round to nearest
#
# `int4_wo_128` has 4-bit weights in groups of 128, and float activations. No calibration data
# are needed; `evaluate` measures perplexity before and after. On text as simple as this one,
# perplexity hardly changes.

# %%
test = Text(str(OUT / "test.txt"), None, length=64)
nearest = ptq(FOLDER, None, config_for("int4_wo_128"), OUT / "llama-rtn", evaluate=test)
print(f"float {nearest.before:.4f}, 4 bits {nearest.after:.4f}")

# %% [markdown]
# ## GPTQ
#
# Algorithms choose better codes for the same format. GPTQ needs calibration text that resembles
# the text of production.

# %%
config = config_for("int4_wo_128").with_(algorithms=("gptq",))
train = Text(str(OUT / "train.txt"), count=32, length=64)
found = ptq(FOLDER, train, config, OUT / "llama-gptq", evaluate=test)
print(f"float {found.before:.4f}, 4 bits with GPTQ {found.after:.4f}")

# %% [markdown]
# ## Will vLLM load it?
#
# `validate_checkpoint` knows vLLM's rules: names, shapes, schemes, kernels. It needs neither vLLM nor a
# GPU.

# %%
verdict = validate_checkpoint(OUT / "llama-gptq", "vllm")
print(verdict)

# %% [markdown]
# On the command line, and the server that runs the result:
#
#     quark-onnx llm ptq llama/ -o llama-gptq/ --scheme int4_wo_128 --data train.txt --algorithm gptq --evaluate test.txt
#     quark-onnx llm validate llama-gptq/ --for vllm
#     vllm serve llama-gptq/
#
# On a GPU with FP8 kernels, `--scheme fp8` is faster and nearly lossless. `--layout
# compressed-tensors` stores the checkpoint as llm-compressor does.
