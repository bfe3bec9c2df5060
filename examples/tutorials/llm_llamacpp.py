# %% [markdown]
# # A language model for llama.cpp
#
# This tutorial writes a GGUF file with 4-bit weights, and reads it back. It needs `pip install
# '.[cpu,llm]'`. The model is a small Llama that `tiny_llama.py` trains in seconds.

# %%
import shutil
import sys
from pathlib import Path

HERE = Path("examples/tutorials") if Path("examples/tutorials").exists() else Path()
sys.path.insert(0, str(HERE))

import tiny_llama
from gguf import GGUFReader

from quark_onnx.torch import write_gguf

OUT = Path("out/tutorials/gguf")
shutil.rmtree(OUT, ignore_errors=True)
FOLDER = OUT / "llama"
tiny_llama.make(FOLDER)

# %% [markdown]
# ## One call
#
# `q4_1` has a scale and an offset for each block of 32; `q4_0` a scale only; `q8_0` 8 bits.

# %%
for kind in ("f16", "q8_0", "q4_1"):
    path = OUT / f"llama-{kind}.gguf"
    write_gguf(FOLDER, path, kind)
    print(f"{kind:5} {path.stat().st_size:>9,} bytes")

# %% [markdown]
# ## What is in the file
#
# The layers, the vocabulary and the settings of the model, with the names of llama.cpp.

# %%
reader = GGUFReader(OUT / "llama-q4_1.gguf")
for tensor in reader.tensors[:4]:
    print(tensor.name, tensor.tensor_type.name, list(map(int, tensor.shape)))

# %% [markdown]
# On the command line:
#
#     quark-onnx llm gguf llama/ -o llama.gguf --kind q4_1
#     llama-cli -m llama.gguf -p "Anna finds"
#
# GPTQ and the other algorithms write GGUF as well, with the codes that they chose:
#
#     quark-onnx llm ptq llama/ -o llama-gguf/ --scheme uint4_wo_32 --data train.txt --algorithm gptq --export gguf
