# %% [markdown]
# # An image classifier, from float to INT8
#
# This tutorial quantizes a small CNN on images of handwritten digits, measures its accuracy,
# finds where accuracy is lost, and improves it. It needs `pip install quark-onnx` and takes
# seconds.

# %%
from pathlib import Path

import numpy as np
import onnxruntime as ort

from quark_onnx import QConfig, analyze, compare, quantize, quantize_static

DIGITS = Path("../digits") if Path("../digits").exists() else Path("examples/digits")
OUT = Path("out/tutorials")
OUT.mkdir(parents=True, exist_ok=True)
MODEL = DIGITS / "digits.onnx"

# %% [markdown]
# ## Data
#
# Calibration data are any iterable of `{input name: array}`. The preprocessing must be that of
# the training: here, pixels from 0 to 16 become numbers from 0 to 1. Test images and labels are
# kept apart.

# %%
digits = np.load(DIGITS / "digits.npz")
calibration = digits["calibration"] / np.float32(16)
test, labels = digits["test"] / np.float32(16), digits["labels"]
samples = [{"image": image} for image in np.split(calibration, 20)]
print(f"{len(calibration)} images for calibration, {len(test)} for the test")


# %%
def accuracy(model: Path) -> float:
    """Return the share of test images with the right class."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"image": test})
    return float((scores.argmax(axis=1) == labels).mean())


print(f"float: {100 * accuracy(MODEL):.2f} %")

# %% [markdown]
# ## Quantize
#
# `A8W8` is the default preset: 8-bit activations and per-channel 8-bit weights.
# `quantize_static` returns the model; `quantize` returns a `Result`, whose report has
# everything that the command line prints.

# %%
result = quantize(MODEL, samples, "A8W8", OUT / "digits_a8w8.onnx")
print(result.report)
print(f"A8W8: {100 * accuracy(OUT / 'digits_a8w8.onnx'):.2f} %")

# %% [markdown]
# The same on the command line, with samples in a file:
#
#     quark-onnx quantize digits.onnx -o digits_a8w8.onnx --data samples.npz
#
# ## Find where accuracy is lost
#
# `compare` measures the outputs, `analyze` every tensor: which one adds the most error, and
# why.

# %%
print(compare(MODEL, OUT / "digits_a8w8.onnx", [{"image": test}]).sqnr, "dB")
analysis = analyze(MODEL, OUT / "digits_a8w8.onnx", samples[:4])
for tensor in sorted(analysis.tensors, key=lambda tensor: -tensor.added)[:3]:
    print(f"{tensor.name:16} {tensor.sqnr:5.1f} dB  {tensor.causes[0].text}")

# %% [markdown]
# ## Harder: power-of-two scales and 4-bit weights
#
# `XINT8` has power-of-two scales, one for each tensor. With 4-bit weights the error of rounding
# matters, and optimizers compensate it.

# %%
configs = {
    "XINT8": QConfig.of("XINT8"),
    "A8W4": QConfig.of("A8W4").with_(optimizers=()),
    "A8W4, optimized": QConfig.of("A8W4").with_(
        optimizers=("gptq:asymmetric=true,scales=true", "bias_correction")
    ),
}
for name, config in configs.items():
    output = OUT / "digits_other.onnx"
    quantize_static(MODEL, samples, config, output)
    sqnr = compare(MODEL, output, [{"image": test}]).sqnr
    print(f"{name:16} {100 * accuracy(output):6.2f} %  {sqnr:5.1f} dB")

# %% [markdown]
# Next: the how-to "Accuracy is too low" lists what else to try; the next tutorial quantizes a
# detector.
