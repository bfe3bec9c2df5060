"""Quantized layers: modules that hold codes and compute with what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn import functional as F

from quark_onnx.torch.affine import Params
from quark_onnx.torch.formats import TwoLevel
from quark_onnx.torch.quantized import Quantized, fake_quantize
from quark_onnx.torch.spec import LayerSpec, TensorSpec


class Rounding(nn.Module):
    """Rounds an activation; with a scale from data, or one that each run computes.

    Args:
        spec: how.
        params: scale and zero point where data has told them; NVFP4's scale of the tensor is the scale there.
    """

    def __init__(self, spec: TensorSpec, params: Params | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("scale", None if params is None else params.scale, persistent=False)
        self.register_buffer("zero", None if params is None else params.zero, persistent=False)

    def forward(self, x: Any) -> Any:
        """What is left of the activation."""
        if self.scale is None:
            return fake_quantize(x, self.spec)
        if isinstance(self.spec.dtype, TwoLevel):
            return fake_quantize(x, self.spec, whole=self.scale)
        return fake_quantize(x, self.spec, Params(self.scale, self.zero))

    def extra_repr(self) -> str:
        return str(self.spec)


class QuantizedLayer(nn.Module):
    """A layer whose weight is codes; what it reads and computes is rounded where its spec says so.

    Args:
        layer: the float layer; its bias is shared, its weight is not kept.
        weight: the codes, or None where the weight stays float.
        spec: how the layer is quantized.
        input, output: scales from data, where there are any.
    """

    def __init__(
        self,
        layer: Any,
        weight: Quantized | None,
        spec: LayerSpec,
        input: Params | None = None,
        output: Params | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.quantized = weight
        kind = kind_of(layer)
        assert kind is not None
        self.kind = "Linear" if kind == "Conv1D" else kind  # whose weight has outputs first here
        self.float_weight: Any = layer.weight if weight is None else None
        self._turned = kind == "Conv1D"
        self.bias = getattr(layer, "bias", None)
        self.input = Rounding(spec.input, input) if spec.input is not None else None
        self.output = Rounding(spec.output, output) if spec.output is not None else None
        self._settings = {name: getattr(layer, name) for name in _SETTINGS.get(self.kind, ())}
        self.shape = tuple(layer.weight.shape[::-1] if self._turned else layer.weight.shape)

    @property
    def weight(self) -> Any:
        """What is left of the weight."""
        if self.quantized is None:
            return self.float_weight.t() if self._turned else self.float_weight
        return outputs_first(self.quantized.dequantize(), self.kind)

    def forward(self, x: Any, *more: Any) -> Any:
        """What the float layer computes, of what is left of its operands."""
        if self.input is not None and self.kind not in ("Embedding", "EmbeddingBag"):
            x = self.input(x)
        found = self.compute(x, self.weight, more)
        return found if self.output is None else self.output(found)

    def compute(self, x: Any, weight: Any, more: Sequence[Any]) -> Any:
        """What the float layer computes with another weight; nothing is rounded."""
        if self.kind == "Embedding":
            return F.embedding(x, weight, **self._settings)
        if self.kind == "EmbeddingBag":
            return F.embedding_bag(x, weight, *more, **self._settings)
        if self.kind == "Conv2d":
            settings = dict(self._settings)
            if (mode := settings.pop("padding_mode")) != "zeros":
                x = F.pad(x, self._settings_padding(), mode=mode)
                settings["padding"] = 0
            return F.conv2d(x, weight, self.bias, **settings)
        if self.kind == "ConvTranspose2d":
            return F.conv_transpose2d(x, weight, self.bias, **self._settings)
        return F.linear(x, weight, self.bias)

    def _settings_padding(self) -> list[int]:
        """The padding of a convolution as ``pad`` takes it: the last axis first."""
        return [side for pad in reversed(self._settings["padding"]) for side in (pad, pad)]

    def extra_repr(self) -> str:
        return f"{self.kind} {list(self.shape)}, weight={self.spec.weight}"


#: What the functions behind the layers take beside their operands.
_SETTINGS = {
    "Embedding": ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    "EmbeddingBag": (
        "max_norm",
        "norm_type",
        "scale_grad_by_freq",
        "mode",
        "sparse",
        "include_last_offset",
        "padding_idx",
    ),
    "Conv2d": ("stride", "padding", "dilation", "groups", "padding_mode"),
    "ConvTranspose2d": ("stride", "padding", "output_padding", "groups", "dilation"),
}


def kind_of(module: Any) -> str | None:
    """The class that a layer can be quantized as; None for other modules.

    A class derived from one of them counts as that class if it computes the same.
    """
    for cls in (nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.Embedding, nn.EmbeddingBag):
        if isinstance(module, cls) and type(module).forward is cls.forward:
            return str(cls.__name__)
    # transformers' own: a Linear whose weight has inputs first
    return "Conv1D" if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def outputs_first(weight: Any, kind: str | None) -> Any:
    """The weight with its output channels first, as quantization expects it; a view. Its own inverse."""
    return weight.transpose(0, 1) if kind in ("ConvTranspose2d", "Conv1D") else weight
