"""Recipes: configurations for kinds of models on CPU runtimes."""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.common.registry import RECIPES, TARGETS
from quark_onnx.config import QConfig
from quark_onnx.targets import refusal


@dataclass(frozen=True)
class Recipe:
    """A configuration for a kind of model.

    Attributes:
        name: as in ``--recipe``.
        models: the kind of model, in words.
        preset: preset of its formats.
        optimizers: optimizers that raise accuracy, as texts.
        advice: reasons for the recipe, and results measured here.
        source: source of the advice.
        op_types: operator types to quantize; empty for all.
    """

    name: str
    models: str
    preset: str
    optimizers: tuple[str, ...]
    advice: str
    source: str
    op_types: tuple[str, ...] = ()

    @property
    def config(self) -> QConfig:
        """Return the configuration."""
        return self._with_preset(self.preset)

    def config_for(self, target: str) -> QConfig:
        """Return the configuration in a format that a target takes.

        Args:
            target: name of the target; empty for none. Its first format takes the place of one
                that it refuses, with the optimizers of the recipe. For a Ryzen AI processor all
                operators are quantized.

        Raises:
            ConfigError: the target is unknown.
        """
        if not target:
            return self.config
        row = TARGETS[target]
        config = self.config
        if refusal(row, config):
            config = self._with_preset(row.presets[0])
        # A processor runs what is quantized; what stays float would run on the CPU.
        return config.with_(op_types=()) if row.is_npu else config

    def instead(self, target: str) -> str:
        """Return why the configuration for a target has another preset; empty if it has not.

        Args:
            target: as for ``config_for``.

        >>> RECIPES["detector"].instead("phx"), RECIPES["detector"].instead("")
        ('phx does not take A8W8, so it is XINT8', '')
        """
        if not target or not refusal(TARGETS[target], self.config):
            return ""
        preset = TARGETS[target].presets[0]
        return f"{target} does not take {self.preset}, so it is {preset}"

    def _with_preset(self, preset: str) -> QConfig:
        return QConfig.of(preset).with_(
            optimizers=self.optimizers, op_types=self.op_types
        )


_HERE = "docs/accuracy.md"

_ROWS = (
    Recipe(
        "classifier",
        "convolutional classifiers: ResNet, MobileNet, EfficientNet",
        "A8W8",
        ("bias_correction",),
        "8-bit weights shift the mean of what a layer computes; correcting it helps"
        " classifiers most",
        _HERE,
    ),
    Recipe(
        "detector",
        "detectors: YOLO, SSD",
        "A8W8",
        ("cle", "bias_correction"),
        "equalization across SiLU and Relu6; the decoding of boxes stays float."
        " YOLOX-nano: 33.1 of 33.7 mAP, 32.7 by default",
        _HERE,
    ),
    Recipe(
        "transformer",
        "encoders: BERT, ViT",
        "A8W8",
        ("smoothquant",),
        "products alone run on integers, the rest stays float; outlier channels are"
        " smoothed where that lowers the error",
        _HERE,
        # ``op_types``: whatever is between the products stays float.
        ("MatMul", "Gemm", "Conv"),
    ),
    Recipe(
        "speech",
        "audio: 1-D convolutions, recurrent networks, spectra",
        "A8W8",
        ("cle", "bias_correction"),
        "small networks with wide activations; where 20 dB are missed, A16W8 is next",
        _HERE,
    ),
    Recipe(
        "superres",
        "image to image: super resolution, denoising",
        "A8W8",
        ("cle", "bias_correction"),
        "every output value counts: no mean may shift, and 16 bits are next where the"
        " PSNR is too low",
        _HERE,
    ),
)
# Recipes are values: the registry has one for each name of ``--recipe``.
for _row in _ROWS:
    RECIPES.add(_row.name, _row)
