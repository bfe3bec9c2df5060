"""From a float model to the folder that an application ships for a Ryzen AI processor, in one
command.

    python examples/ryzen_ai/deploy.py [OUT]

Takes the network of examples/digits; OUT is out/ryzen_ai/bundle by default. No processor is needed
to make it.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

from quark_onnx import npu
from quark_onnx.common.registry import NPU_RECIPES

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/digits/digits.onnx"


def accuracy(model: Path, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images whose highest score is that of the right class; one image at a time."""
    session = ort.InferenceSession(model)
    scores = np.concatenate(
        [
            session.run(None, {"image": image})[0]
            for image in np.split(images, len(images))
        ]
    )
    return float((scores.argmax(axis=1) == labels).mean())


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "out/ryzen_ai/bundle"
    digits = np.load(MODEL.with_name("digits.npz"))
    calibration, test = (
        digits[name] / np.float32(16) for name in ("calibration", "test")
    )
    bundle = npu.deploy(
        MODEL, [{"image": calibration}], folder, "stx", NPU_RECIPES["classifier"].config
    )
    print(bundle)
    for name, model in (("float32", MODEL), ("the bundle", folder / "model.onnx")):
        print(f"accuracy of {name}: {accuracy(model, test, digits['labels']):.4f}")
    print(
        f"next, on the machine with the NPU: python {folder / 'compare.py'} --device npu"
    )


if __name__ == "__main__":
    main()
