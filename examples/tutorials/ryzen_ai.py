# %% [markdown]
# # A bundle for a Ryzen AI laptop
#
# This tutorial goes from a float model to the folder that an application ships. No NPU is
# needed to make it. It needs `pip install quark-onnx`.

# %%
from pathlib import Path

import numpy as np
import onnxruntime as ort

from quark_onnx import npu

DIGITS = Path("../digits") if Path("../digits").exists() else Path("examples/digits")
OUT = Path("out/tutorials")
OUT.mkdir(parents=True, exist_ok=True)
MODEL = DIGITS / "digits.onnx"
digits = np.load(DIGITS / "digits.npz")
calibration = digits["calibration"] / np.float32(16)
test, labels = digits["test"] / np.float32(16), digits["labels"]

# %% [markdown]
# ## Will it run on the NPU?
#
# The forecast names NPU, CPU or "abort" for every node, with the reason and its source.

# %%
print(npu.preflight(MODEL, "stx"))

# %% [markdown]
# ## Deploy
#
# `deploy` legalizes the model (static shapes, explicit attributes), quantizes it within the
# rules of the engine, checks it, and writes the bundle. `choose` finds the recipe by the
# structure of the model.

# %%
choice = npu.choose(MODEL, "stx")
print(choice)
bundle = npu.deploy(
    MODEL, [{"image": calibration}], OUT / "bundle", "stx", choice.config
)
print(bundle)


# %%
def accuracy(model: Path) -> float:
    """Return the share of test images with the right class, one image at a time."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    right = 0
    for image, label in zip(np.split(test, len(test)), labels, strict=True):
        right += int(session.run(None, {"image": image})[0].argmax() == label)
    return right / len(test)


print(f"float {accuracy(MODEL):.4f}, bundle {accuracy(OUT / 'bundle/model.onnx'):.4f}")

# %% [markdown]
# ## On the laptop
#
# Copy the folder. `compare.py` runs the samples on the NPU and compares the outputs with the
# recorded ones:
#
#     python bundle/compare.py --device npu
#
# In the application, `npu_session.py` (or `npu_session.hpp`) opens the model, and falls back to
# the CPU with a message:
#
#     python bundle/npu_session.py bundle/samples/0000.npz
#
# On the command line, all of the above is one command:
#
#     quark-onnx npu deploy digits.onnx -o bundle --target stx --data samples.npz --recipe auto
