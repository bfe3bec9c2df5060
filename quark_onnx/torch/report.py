"""TorchReport: what became of a PyTorch model."""

from __future__ import annotations

from dataclasses import dataclass, field

from quark_onnx.torch.algorithms.base import Outcome
from quark_onnx.torch.spec import LayerSpec


@dataclass
class TorchReport:
    """What became of a model.

    Attributes:
        quantized: specs of the layers that are quantized, by name.
        kept: names of the layers that stay float, each with the reason.
        notes: what a user should know.
        outcomes: what algorithms made of layers.
    """

    quantized: dict[str, LayerSpec] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def weight_only(self, name: str) -> LayerSpec:
        """Note that the data has not reached a layer, and return how it is quantized then."""
        self.notes.append(f"{name} was not run on the data: only its weight is quantized")
        self.quantized[name] = LayerSpec(self.quantized[name].weight)
        return self.quantized[name]
