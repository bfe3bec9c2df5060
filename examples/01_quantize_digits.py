"""Quantize a small network on handwritten digits with four presets: size, accuracy and SQNR of
each.

    python examples/01_quantize_digits.py

Writes the quantized models to out/digits. examples/digits/README.md describes the network and its
images.
"""

from pathlib import Path

import numpy as np
import onnxruntime as ort

from quark_onnx import QConfig, compare, quantize_static

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples/digits/digits.onnx"
OUT = ROOT / "out/digits"


def accuracy(model: Path, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images whose highest score is that of the right class."""
    (scores,) = ort.InferenceSession(model).run(None, {"image": images})
    return float((scores.argmax(axis=1) == labels).mean())


def main() -> None:
    digits = np.load(MODEL.with_name("digits.npz"))
    calibration, test = (
        digits[name] / np.float32(16) for name in ("calibration", "test")
    )
    samples = [
        {"image": image} for image in np.split(calibration, 8)
    ]  # any iterable of {input name: array}

    print("model            KiB  accuracy  SQNR dB")
    print(
        f"float32      {MODEL.stat().st_size / 1024:7.1f} "
        f" {accuracy(MODEL, test, digits['labels']):8.4f}"
    )

    OUT.mkdir(parents=True, exist_ok=True)
    for name, config in {
        "A8W8": QConfig.of("A8W8").with_(per_channel=True),
        "S8S8": "S8S8",
        "A16W8": "A16W8",
        "XINT8": "XINT8",
    }.items():
        output = OUT / f"{name}.onnx"
        quantize_static(MODEL, samples, config, output)
        size, sqnr = (
            output.stat().st_size / 1024,
            compare(MODEL, output, [{"image": test}]).sqnr,
        )
        print(
            f"{name:12} {size:7.1f}  {accuracy(output, test, digits['labels']):8.4f} "
            f" {sqnr:7.2f}"
        )


if __name__ == "__main__":
    main()
