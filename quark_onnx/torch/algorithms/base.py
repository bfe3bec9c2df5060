"""What algorithms work on: a block of a model, what it is called with, and what it should compute.

Two kinds of algorithms take part in a configuration, in its order. A ``Transform`` rewrites the
float weights of a block so that they are easier to round; what the block computes stays. A
``Rounder`` chooses codes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import nn

from quark_onnx.torch.calibration.block_stream import Call
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
    """What an algorithm made of a layer.

    Attributes:
        layer: its name in the model, or that of a block; empty for all of the model.
        algorithm: the name of the algorithm.
        before, after: mean squared error of what the layer (or the block) computes, to the nearest
        and now, as a share
            of the mean square of what the float one computes, which of many outputs is estimated;
            of all of the model,
            the divergence of its predictions from those of the float one, in nats for each token.
        note: what a user should know.
    """

    layer: str
    algorithm: str
    before: float
    after: float
    note: str = ""


@dataclass
class BlockJob:
    """One block on its way from weights to codes.

    Attributes:
        name: of the block in the model.
        block: the module, with its float layers.
        layers: those of its layers that are quantized, by their names in the model.
        floats: what it is called with in the float model.
        calls: what it is called with in the model whose blocks before it are quantized; aligned
            with ``floats``.
        targets: the hidden states that it computes of ``floats``.
        scales: of activations, that data has told.
        known: what was found out about blocks of the same kind before, by what makes them the same.
        replay: runs the block with the codes that the last rounder has chosen, if that knows how to
            save work.
    """

    name: str
    block: Any
    layers: Layers
    floats: Sequence[Call]
    calls: Sequence[Call]
    targets: Sequence[Any] = ()
    scales: Scales = field(default_factory=Scales)
    known: dict[Any, Any] = field(default_factory=dict)
    replay: Any = None

    def weights(self) -> Iterator[tuple[str, Any, LayerSpec]]:
        """Names, float weights with outputs first, and specs of the layers whose weights are
        quantized.
        """
        for name, (module, spec) in self.layers.items():
            if spec.weight is not None:
                yield name, outputs_first(module.weight.detach(), kind_of(module)), spec

    def quantized(
        self,
        made: Mapping[str, Quantized],
        names: Iterable[str] | None = None,
    ) -> dict[str, QuantizedLayer]:
        """Layers to run with these codes, their activations rounded as the specs say.

        Weights are decoded once.

        Args:
            made: codes; the weights of other layers stay float.
            names: of layers; None for all.
        """
        chosen = {
            name: self.layers[name]
            for name in (self.layers if names is None else names)
        }
        found = dict[str, QuantizedLayer]()
        for name, (module, spec) in chosen.items():
            own = spec.with_(weight=None)
            layer = found[name] = QuantizedLayer(
                module,
                None,
                own,
                **self.scales.of(name),
            )
            if name in made:
                left = outputs_first(made[name].dequantize(), kind_of(module))
                layer.float_weight = nn.Parameter(left, requires_grad=False)
        return found

    @contextlib.contextmanager
    def put(self, layers: Mapping[str, Any]) -> Iterator[None]:
        """The block with modules in the place of layers, by their names in the model.

        The layers come back.
        """
        own = {
            self.local(name): self.block.get_submodule(self.local(name))
            for name in layers
        }
        put_modules(
            self.block,
            {self.local(name): layer for name, layer in layers.items()},
        )
        try:
            yield
        finally:
            put_modules(self.block, own)

    def with_float_activations(self) -> BlockJob:
        """Return the same job with weight-only layers: activations stay as the layers compute them."""  # noqa: E501
        if all(spec.weight_only for _, spec in self.layers.values()):
            return self
        layers = {
            name: (module, LayerSpec(spec.weight))
            for name, (module, spec) in self.layers.items()
        }
        return replace(self, layers=layers)

    def local(self, name: str) -> str:
        """The name of a layer as seen from the block."""
        return name.removeprefix(f"{self.name}.")


@runtime_checkable
class Transform(Protocol):
    """Rewrites float weights of a block in place, so that what it computes of ``job.floats`` stays
    the same.
    """

    name: ClassVar[str]
    stage: ClassVar[str]  # "block"

    def __call__(self, job: BlockJob) -> list[Outcome]:
        """Rewrite; ``job.targets`` and the scales are not there yet."""
        ...


@runtime_checkable
class Rounder(Protocol):
    """Chooses the codes of a block's weights.

    Attributes:
        aims_at_float: whether it reads ``job.floats`` or ``job.targets``, and not what quantized
            blocks leave alone.
        rounds_activations: whether activations are quantized, as the specs say, while it chooses
            codes.
    """

    name: ClassVar[str]
    stage: ClassVar[str]  # "weights"

    @property
    def aims_at_float(self) -> bool: ...

    @property
    def rounds_activations(self) -> bool: ...

    def __call__(
        self,
        job: BlockJob,
        made: Mapping[str, Quantized],
    ) -> tuple[dict[str, Quantized], list[Outcome]]:
        """Better codes.

        Args:
            made: the codes so far, to the nearest or another algorithm's.
        """
        ...
