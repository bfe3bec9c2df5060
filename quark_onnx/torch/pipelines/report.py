"""TorchReport: the result of a quantization, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from quark_onnx.report import percentage
from quark_onnx.torch.algorithms.base import UNREACHED, Outcome
from quark_onnx.torch.config.spec import LayerSpec


@dataclass
class TorchReport:
    """What became of a model.

    Attributes:
        quantized: specs of the layers that are quantized, by name.
        kept: names of the layers that stay float, each with the reason.
        notes: what a user should know.
        outcomes: what algorithms made of layers.
        kept_codes: names of the layers whose codes are those of the checkpoint, which had the
            format already.
    """

    quantized: dict[str, LayerSpec] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    kept_codes: list[str] = field(default_factory=list)

    def gains(self) -> dict[str, str]:
        """What each algorithm has made better, in one line, by its name.

        >>> TorchReport(outcomes=[Outcome("q", "gptq", 0.2, 0.1), Outcome("k", "gptq", 0.0, 0.0)]).gains()
        {'gptq': 'the error of 1 of 2 is less, by 50 % (median)'}
        """  # noqa: E501
        found = dict[str, str]()
        for name in dict.fromkeys(each.algorithm for each in self.outcomes):
            own = [each for each in self.outcomes if each.algorithm == name]
            less = sorted(
                1 - each.after / each.before for each in own if each.after < each.before
            )
            middle = f", by {percentage(less[len(less) // 2])} (median)" if less else ""
            found[name] = f"the error of {len(less)} of {len(own)} is less{middle}"
        return found

    def note_idle(self, algorithms: Iterable[Any]) -> None:
        """Note the algorithms that have said nothing of any layer, and the layers that the data has
        not reached.
        """
        for name in dict.fromkeys(each.algorithm for each in self.outcomes):
            layers = [
                each.layer
                for each in self.outcomes
                if (each.algorithm, each.note) == (name, UNREACHED)
            ]
            if layers:
                others = (
                    "" if len(layers) == 1 else f" and {len(layers) - 1} more layers"
                )
                verb = "is" if len(layers) == 1 else "are"
                self.notes.append(
                    f"{layers[0]}{others} {verb} not reached by the data: {name} rounds"
                    " to nearest there",
                )
        told = {each.algorithm for each in self.outcomes}
        for each in algorithms:
            if each.stage != "model" and each.name not in told:
                self.notes.append(
                    f"{each.name} has changed nothing: it has found nothing in the"
                    " blocks that it works on",
                )

    def note_outside(self, names: Iterable[str], algorithms: Iterable[Any]) -> None:
        """Note the layers outside of blocks whose weights no algorithm sees.

        Args:
            names: of the layers.
        """
        rounders = [each for each in algorithms if each.stage == "weights"]
        learning = " and ".join(each.name for each in rounders if each.needs_data)
        alone = " and ".join(each.name for each in rounders if not each.needs_data)
        how = f"by {alone} alone" if alone else "to the nearest"
        for name in names:
            if learning and self.quantized[name].weight is not None:
                self.notes.append(
                    f"{name} lies outside of the blocks that {learning} works on: it is"
                    f" rounded {how}",
                )

    def weight_only(self, name: str) -> LayerSpec:
        """Note that the data has not reached a layer, and return how it is quantized then."""
        self.notes.append(
            f"{name} was not run on the data: only its weight is quantized",
        )
        self.quantized[name] = LayerSpec(self.quantized[name].weight)
        return self.quantized[name]

    def note_borrowing(self, names: Iterable[str]) -> None:
        """Note the experts whose input scale is that of the others."""
        self.notes += [
            f"{name} was not run on the data: its input scale is the greatest of the"
            " other experts"
            for name in names
        ]

    def stay_float(self, name: str) -> None:
        """Note that the data has not reached a layer outside of the blocks, which stays float then."""  # noqa: E501
        self.notes.append(
            f"{name} lies outside of the blocks, and was not run on the data: it stays"
            " float",
        )
        self.kept[name] = "it was not run on the data"
        del self.quantized[name]
