# %% [markdown]
# # A detector
#
# Detectors lose more accuracy than classifiers: boxes need more than 8 bits, and boxes and
# scores often share one output. This tutorial quantizes a small detector (three convolutions
# with SiLU, a grid of 4 x 4 cells, decoding by Exp and a grid of centers), and measures boxes
# instead of decibels. It needs `pip install quark-onnx`.

# %%
from pathlib import Path

import numpy as np
import onnxruntime as ort

from quark_onnx import QConfig, quantize_static

DATA = Path("data") if Path("data").exists() else Path("examples/tutorials/data")
OUT = Path("out/tutorials")
OUT.mkdir(parents=True, exist_ok=True)
MODEL = DATA / "detector.onnx"

images = np.load(DATA / "detector.npz")
calibration = images["calibration"][:, None] / np.float32(255)
test, truth = images["test"][:, None] / np.float32(255), images["boxes"]
samples = [{"image": image} for image in np.split(calibration, 16)]

# %% [markdown]
# ## A metric
#
# A predicted box is right if its overlap with a true box (intersection over union) is above
# 0.75. F1 joins precision and recall. Write the metric of your task first: without it, no
# decision below can be made.


# %%
def overlap(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the intersection over union of one box with others; corners in columns."""
    low = np.maximum(box[:2], others[:, :2])
    high = np.minimum(box[2:], others[:, 2:])
    common = np.prod(np.clip(high - low, 0, None), axis=1)
    sizes = np.prod(others[:, 2:] - others[:, :2], axis=1)
    return common / (np.prod(box[2:] - box[:2]) + sizes - common)


def f1(model: Path, threshold: float = 0.5, least: float = 0.75) -> float:
    """Return F1 in percent on the test images."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    (predictions,) = session.run(None, {"image": test})
    right = found = there = 0
    for rows, boxes in zip(predictions, truth, strict=True):
        boxes = boxes[boxes[:, 2] > 0]
        rows = rows[rows[:, 4] > threshold]
        there += len(boxes)
        found += len(rows)
        for row in rows:
            matches = overlap(row[:4], boxes) if len(boxes) else np.zeros(0)
            if matches.size and matches.max() > least:
                right += 1
                boxes = np.delete(boxes, matches.argmax(), axis=0)
    return 100 * 2 * right / max(1, found + there)


print(f"float: F1 {f1(MODEL):.1f}")

# %% [markdown]
# ## The decoding stays float
#
# The plan recognizes the decoding of boxes behind the last convolution and keeps it in float.
# `safe=False` shows what would happen otherwise: coordinates up to 640 and scores up to 1 share
# a scale, and no score is left.

# %%
for name, config in {
    "A8W8": QConfig.of("A8W8"),
    "A8W8, decoding quantized": QConfig.of("A8W8").with_(safe=False),
}.items():
    quantize_static(MODEL, samples, config, OUT / "detector.onnx")
    print(f"{name}: F1 {f1(OUT / 'detector.onnx'):.1f}")

# %% [markdown]
# ## Better boxes
#
# `A16W8` tells that activations cause the loss: with 16 bits for all of them, the boxes are
# right. Mixed precision gives 16 bits to as few nodes as possible until every output reaches a
# target.

# %%
options = {
    "A16W8": QConfig.of("A16W8"),
    "A8W8, bias correction": QConfig.of("A8W8").with_(optimizers=("bias_correction",)),
    "A8W8, mixed to 35 dB": QConfig.of("A8W8").with_(
        optimizers=("auto_mixed_precision:target=35",)
    ),
}
for name, config in options.items():
    quantize_static(MODEL, samples, config, OUT / "detector.onnx")
    print(f"{name:22} F1 {f1(OUT / 'detector.onnx'):.1f}")

# %% [markdown]
# On the command line:
#
#     quark-onnx quantize detector.onnx -o detector_int8.onnx --data samples.npz --auto-mixed 35
#
# Larger detectors gain from `--optimize cle:silu=scale,relu6=bound` as well.
