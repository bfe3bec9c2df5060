"""Recipes: configurations by kind of model, from AMD's advice and own measurements."""

from __future__ import annotations

from quark_onnx.common.registry import NPU_RECIPES
from quark_onnx.recipes import Recipe

_LADDER = "AMD Quark, ryzen_ai_best_practice.rst (0.11)"
_MODELS = "RyzenAI-SW, advanced quantization and object detection examples (2026-02)"
_DOCS = "Ryzen AI documentation 1.8 (2026-07-23), model_quantization.rst"


_ROWS = (
    Recipe(
        "classifier",
        "plain convolutional networks: ResNet, SqueezeNet",
        "XINT8",
        ("cle:relu6=replace", "adaquant:iterations=200", "bias_correction"),
        "the vendor's ladder: CLE, AdaRound, AdaQuant; runs on every device"
        " (benchmarks/results/npu.md)",
        _LADDER,
    ),
    Recipe(
        "depthwise",
        "networks of depthwise convolutions on any device: MobileNet, EfficientNet",
        "XINT8",
        ("cle:relu6=replace", "adaround:iterations=200", "bias_correction"),
        "the vendor: CLE alone does not help, AdaRound does; on stx and krk A16W8 is"
        " forecast to run in one piece",
        _MODELS,
    ),
    Recipe(
        "detector",
        "detectors with SiLU: YOLOX, YOLOv8; stx and krk",
        "A8W8",
        ("cle:silu=scale", "gptq:asymmetric=true", "bias_correction"),
        "the vendor leaves the decoding of boxes float, as is done here by itself;"
        " YOLOX-nano: 32.2 of 33.7 mAP",
        _MODELS,
    ),
    Recipe(
        "transformer",
        "encoders: BERT, ViT; stx and krk",
        "BF16",
        (),
        "the vendor's compiler takes the float32 model; with 16-bit activations"
        " instead, A16W8",
        _DOCS,
    ),
)
for _row in _ROWS:
    NPU_RECIPES.add(_row.name, _row)
