"""TorchReport: the result of a quantization, layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

from quark_onnx.common.containers import grouped, grouped_by
from quark_onnx.common.wording import counted, labelled, tally
from quark_onnx.page.blocks import Block, Facts, Notes, Reasons
from quark_onnx.page.reported import Reported
from quark_onnx.report import percentage
from quark_onnx.torch.algorithms.base import UNREACHED, Outcome
from quark_onnx.torch.config.algorithm_order import at_stage
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.page.errors import layer_errors
from quark_onnx.torch.page.experts import expert_tokens
from quark_onnx.torch.page.tables import formats_table, layers_table


@dataclass
class TorchReport(Reported):
    """Report on a quantized model.

    Attributes:
        quantized: specs of the quantized layers, by name.
        kept: reasons why layers stay float, by layer name.
        notes: notes for the user.
        outcomes: results of algorithms, by layer.
        kept_codes: names of the layers that keep the checkpoint's codes, since their format is the
            requested one.
    """

    quantized: dict[str, LayerSpec] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    kept_codes: list[str] = field(default_factory=list)

    @property
    def headline(self) -> str:
        """The numbers of quantized layers and of float layers, in words."""
        quantized = counted(len(self.quantized), "layer is", "layers are")
        kept = counted(len(self.kept), "stays", "stay")
        return f"{quantized} quantized, {kept} float"

    def facts(self) -> Facts:
        """Return the numbers of layers, and the gains of the algorithms."""
        # Layers with a float weight, whose activations alone are rounded, are not counted.
        types = Counter(
            str(spec.weight.dtype.name)
            for spec in self.quantized.values()
            if spec.weight
        )
        rows = [
            (
                "Layers quantized",
                f"{len(self.quantized):,}",
                tally(types.most_common(3)),
            ),
            ("Stay float", f"{len(self.kept):,}", ""),
        ]
        kept_codes = counted(
            len(self.kept_codes),
            "layer has the format already and keeps its codes",
            "layers have the format already and keep their codes",
        )
        layers = [self.headline, *([kept_codes] if self.kept_codes else [])]
        return Facts(rows, {"layers": layers, "gains": labelled(self.gains())})

    def blocks(self) -> list[Block]:
        """Return the layers, the gains of the algorithms and the notes as blocks."""
        return [self.facts(), *self.sections()]

    def sections(self) -> list[Block]:
        """Return the blocks below the facts."""
        return [
            Notes("Notes", self.notes, "notes"),
            layer_errors(self.outcomes, self.quantized, self.gains()),
            expert_tokens(self.outcomes),
            formats_table(self.quantized),
            layers_table(self.quantized, self.outcomes),
            Reasons("Stays float", self.kept, "layer", "layers", "float"),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "quantized": {
                name: str(spec.weight) for name, spec in self.quantized.items()
            },
            "specs": {name: _spec(spec) for name, spec in self.quantized.items()},
            # the key stands in cli/answers.schema.json
            "float": self.kept,
            "notes": self.notes,
            "kept_codes": self.kept_codes,
            "algorithms": list(map(asdict, self.outcomes)),
        }

    @property
    def algorithms(self) -> list[str]:
        """The names of the algorithms with outcomes, in the order of execution."""
        # a dictionary keeps the order, which a set would lose
        return list(dict.fromkeys(map(attrgetter("algorithm"), self.outcomes)))

    def gains(self) -> dict[str, str]:
        """Return a one-line summary of the error reduction of each algorithm, by name.

        >>> TorchReport(outcomes=[Outcome("q", "gptq", 0.2, 0.1), Outcome("k", "gptq", 0.0, 0.0)]).gains()
        {'gptq': 'the error of 1 of 2 is less, by 50 % (median)'}
        """  # noqa: E501
        outcomes = grouped_by(self.outcomes, attrgetter("algorithm"))
        return {name: _gain(outcomes[name]) for name in self.algorithms}

    def note_idle(self, algorithms: Iterable[Any]) -> None:
        """Add notes on algorithms without an outcome, and on inactive layers.

        Args:
            algorithms: the algorithms of the configuration. Rotations report no outcomes, and get
                no note.
        """
        # layers by algorithm
        unreached = grouped(
            (outcome.algorithm, outcome.layer)
            for outcome in self.outcomes
            if outcome.note == UNREACHED
        )
        for name in self.algorithms:
            if name in unreached:
                self.notes.append(
                    f"{_are(unreached[name])} not reached by the data: {name} rounds"
                    " to nearest there",
                )
        for algorithm in algorithms:
            # rotations rewrite the whole model, and report no outcomes
            if algorithm.stage != "model" and algorithm.name not in self.algorithms:
                self.notes.append(
                    f"{algorithm.name} has changed nothing: it has found nothing in the"
                    " blocks that it works on",
                )

    def note_outside(self, names: Iterable[str], algorithms: Iterable[Any]) -> None:
        """Add notes on layers outside of the blocks, to which no algorithm is applied.

        Args:
            names: the names of the layers.
            algorithms: the algorithms of the configuration.
        """
        # data-free algorithms work on single weights, and so outside of the blocks, too
        rounders = at_stage(algorithms, "weights")
        learning, alone = list[str](), list[str]()
        for rounder in rounders:
            names_of_kind = learning if rounder.needs_data else alone
            names_of_kind.append(rounder.name)
        # without an algorithm that learns, all weights are rounded alike, and there is nothing to
        # note
        if not learning:
            return
        how = f"by {' and '.join(alone)} alone" if alone else "to the nearest"
        for name in names:
            if self.quantized[name].weight is not None:
                self.notes.append(
                    f"{name} lies outside of the blocks that {' and '.join(learning)}"
                    f" works on: it is rounded {how}",
                )

    def weight_only(self, name: str) -> LayerSpec:
        """Add a note on an inactive layer, and return the weight-only spec.

        Args:
            name: name of a layer among the quantized ones; its entry is replaced.
        """
        self.notes.append(
            f"{name} was not run on the data: only its weight is quantized",
        )
        # the report and the checkpoint must agree: without a scale nothing else is quantized
        self.quantized[name] = LayerSpec(self.quantized[name].weight)
        return self.quantized[name]

    def note_borrowing(self, names: Iterable[str]) -> None:
        """Add notes on experts that take the input scale of other experts."""
        for name in names:
            self.notes.append(
                f"{name} was not run on the data: its input scale is the greatest of"
                " the other experts",
            )

    def stay_float(self, name: str) -> None:
        """Note that an inactive layer outside of the blocks stays float.

        Args:
            name: name of a layer, which moves from the quantized layers to the float ones.
        """
        self.notes.append(
            f"{name} lies outside of the blocks, and was not run on the data: it stays"
            " float",
        )
        self.kept[name] = "it was not run on the data"
        del self.quantized[name]


def _gain(outcomes: list[Outcome]) -> str:
    """Return a one-line summary of the error reduction of an algorithm."""
    reductions = list[float]()
    for outcome in outcomes:
        if outcome.after < outcome.before and outcome.before > 0:
            reductions.append(1 - outcome.after / outcome.before)
    text = f"the error of {len(reductions)} of {len(outcomes)} is less"
    if not reductions:
        return text
    # the upper median: it is an error that a layer has, not a mean of two
    median = sorted(reductions)[len(reductions) // 2]
    return f"{text}, by {percentage(median)} (median)"


def _are(layers: list[str]) -> str:
    """Return layers as the subject of a sentence.

    >>> _are(["up"]), _are(["up", "down", "gate"])
    ('up is', 'up and 2 more layers are')
    """
    if len(layers) == 1:
        return f"{layers[0]} is"
    return f"{layers[0]} and {counted(len(layers) - 1, 'more layer')} are"


def _spec(spec: LayerSpec) -> dict[str, str]:
    """Return the formats of a layer's tensors that are quantized, by side."""
    sides = {
        "weight": spec.weight,
        "input": spec.input,
        "output": spec.output,
        "probabilities": spec.probabilities,
    }
    return {side: str(form) for side, form in sides.items() if form is not None}
