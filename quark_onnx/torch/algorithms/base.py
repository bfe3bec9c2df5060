"""The interface of algorithms: blocks of a model with their inputs and targets, and outcomes.

A configuration lists algorithms of two kinds. A ``Transform`` rewrites the float weights of a block
to make rounding easier, without a change of the block's function. A ``Rounder`` chooses codes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

from quark_onnx.torch.calibration.block_stream import BlockArguments
from quark_onnx.torch.calibration.observers import Scales
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.quantized_layer import (
    Layers,
    QuantizedLayer,
    kind_of,
    outputs_first,
)
from quark_onnx.torch.models.structure import put_modules

#: The note of an outcome whose layer the data has not reached, so that it is rounded to nearest.
UNREACHED = "the data has not reached it"


@dataclass(frozen=True)
class Outcome:
    """The result of an algorithm for a layer.

    Attributes:
        layer: the name of the layer or block in the model; empty for the whole model.
        algorithm: the name of the algorithm.
        before: the error with round to nearest: the mean squared error of the outputs as a share of
            the mean square of the float outputs, which is estimated for many outputs; without data,
            that of the weight. For the whole model, the divergence of predictions from the float
            model in nats per token.
        after: the error with the new codes.
        note: a remark for the user.
    """

    layer: str
    algorithm: str
    before: float
    after: float
    note: str = ""

    @classmethod
    def unchanged(cls, layer: str, algorithm: str, note: str) -> Outcome:
        """Return the outcome for a layer that keeps its codes.

        Args:
            layer: the name of the layer.
            algorithm: the name of the algorithm.
            note: the reason.
        """
        return cls(layer, algorithm, 0.0, 0.0, note)


#: The codes of weights by layer, and what became of each layer.
Chosen = tuple[dict[str, Quantized], list[Outcome]]


@dataclass
class BlockJob:
    """A block on the way from weights to codes.

    Attributes:
        name: the name of the block in the model.
        block: the module, with float layers.
        layers: the quantized layers, by their names in the model.
        floats: the calls of the block in the float model, one per sample.
        calls: the calls in the model whose earlier blocks are quantized; aligned with ``floats``.
        targets: the hidden states after the block in the float model.
        scales: calibrated scales of activations.
        known: results for earlier blocks of the same kind, by a key of the kind.
        replay: runs the block with the codes of the last rounder from stored activations; None
            where that rounder keeps none.
    """

    name: str
    block: nn.Module
    layers: Layers
    floats: Sequence[BlockArguments]
    calls: Sequence[BlockArguments]
    targets: Sequence[torch.Tensor] = ()
    scales: Scales = field(default_factory=Scales)
    known: dict[Any, Any] = field(default_factory=dict)
    replay: Any = None

    def weights(self) -> Iterator[tuple[str, torch.Tensor, LayerSpec]]:
        """Yield name, float weight (outputs, inputs) and spec of layers with quantized weights."""
        for name, (module, spec) in self.layers.items():
            if spec.weight is not None:
                # A view of the module's weight: no copy of the layer's size.
                weight = outputs_first(module.weight.detach(), kind_of(module))
                yield name, weight, spec

    def quantized(
        self,
        quantized_weights: Mapping[str, Quantized],
        names: Iterable[str] | None = None,
    ) -> dict[str, QuantizedLayer]:
        """Return layers that run with the given codes, their activations rounded as specified.

        Weights are dequantized once.

        Args:
            quantized_weights: the codes; weights of other layers stay float.
            names: the layers to return; None for all.
        """
        if names is None:
            names = self.layers
        layers = dict[str, QuantizedLayer]()
        for name in names:
            module, spec = self.layers[name]
            # Activations only: the dequantized weight below takes the place of codes, so that
            # repeated runs do not decode again.
            layer = layers[name] = QuantizedLayer(
                module, None, spec.with_(weight=None), **self.scales.of(name)
            )
            if name in quantized_weights:
                codes = quantized_weights[name]
                # Codes have outputs first; the layer expects the shape of the float layer's weight.
                weight = outputs_first(codes.dequantize(), kind_of(module))
                layer.float_weight = nn.Parameter(weight, requires_grad=False)
        return layers

    @contextlib.contextmanager
    def put(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """Replace layers of the block, by their names in the model, inside the context."""
        originals = dict[str, nn.Module]()
        replacements = dict[str, nn.Module]()
        for name, layer in layers.items():
            local = self.local(name)
            # Read before anything is replaced: put_modules finds places by the identity of modules.
            originals[local] = self.block.get_submodule(local)
            replacements[local] = layer
        put_modules(self.block, replacements)
        try:
            yield
        finally:
            put_modules(self.block, originals)

    def with_float_activations(self) -> BlockJob:
        """Return the job with weight-only layers: activations stay float."""
        # The same layers: the caller sees by their identity that a replay stays valid.
        if all(spec.weight_only for _, spec in self.layers.values()):
            return self
        layers = {
            name: (module, LayerSpec(spec.weight))
            for name, (module, spec) in self.layers.items()
        }
        return replace(self, layers=layers)

    def local(self, name: str) -> str:
        """Return the name of a layer inside of the block."""
        return name.removeprefix(f"{self.name}.")


@runtime_checkable
class Transform(Protocol):
    """Rewrites float weights of a block in place; the function of the block is unchanged."""

    name: ClassVar[str]
    stage: ClassVar[str]  # "block"

    def __call__(self, job: BlockJob) -> list[Outcome]:
        """Rewrite the weights; ``job.targets`` and the scales are not known yet."""
        ...


@runtime_checkable
class Rounder(Protocol):
    """Chooses the codes of a block's weights.

    Attributes:
        aims_at_float: ``job.floats`` or ``job.targets`` are read.
        rounds_activations: activations are quantized, as specified, while codes are chosen.
    """

    name: ClassVar[str]
    stage: ClassVar[str]  # "weights"

    @property
    def aims_at_float(self) -> bool:
        """Whether outputs or inputs of the float model are needed."""
        ...

    @property
    def rounds_activations(self) -> bool:
        """Whether activations are quantized while codes are chosen."""
        ...

    def __call__(
        self,
        job: BlockJob,
        quantized_weights: Mapping[str, Quantized],
    ) -> Chosen:
        """Return better codes.

        Args:
            job: the block.
            quantized_weights: the codes so far, rounded to nearest or by another algorithm.
        """
        ...
