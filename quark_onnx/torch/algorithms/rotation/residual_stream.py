"""The residual stream of a language model: its readers and writers, found by probing.

A part of a model is run on its input, and once more on the input plus a large multiple of one
direction. Norms bound their outputs, so that the direction appears again, up to a factor for each
token, only in inputs that are read from the stream directly. In the same way, a direction that is
added to a module's output appears in the stream if the module writes to it. No module is known by
its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.algorithms.rescaling.channel_pairs import pattern_of
from quark_onnx.torch.models.quantized_layer import kind_of, outputs_first
from quark_onnx.torch.models.recording import Changes, recording

#: The multiple of a direction, relative to the hidden states.
_LARGE = 1e4
#: The greatest share of a difference across the direction: rounding errors, and bounded values.
_SMALL = 0.05


@dataclass(frozen=True)
class Reading:
    """Layers that read the stream, with or without a norm.

    Attributes:
        readers: names of modules with a weight.
        norm: name of the norm; None for readers of the stream itself.
        neutral: the value of the norm's weight for a gain of 1: 1, or 0 for a norm that multiplies
            by 1 + weight; None without a weight.
        centered: whether the norm subtracts means.
    """

    readers: tuple[str, ...]
    norm: str | None = None
    neutral: float | None = None
    centered: bool = False


@dataclass(frozen=True)
class Heads:
    """Values of attention heads: outputs of a layer that another layer reads mixed over tokens.

    Attributes:
        source, reader: names of the layers.
        starts: first output of the source for each head.
        size: number of outputs of a head.
    """

    source: str
    reader: str
    starts: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class StreamRole:
    """The relation of a part of a model to the stream.

    Attributes:
        readings: the readers of the stream.
        writers: names of the modules whose outputs are added to the stream.
    """

    readings: tuple[Reading, ...] = ()
    writers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """The record of a run: the result, and the inputs and outputs of modules, call by call."""

    result: torch.Tensor
    inputs: dict[str, list[torch.Tensor]]
    outputs: dict[str, list[torch.Tensor]]


@dataclass(frozen=True)
class ModelPart:
    """A part of a model that can be run.

    Attributes:
        modules: its modules, by their names in the model.
        run: computes what the part writes to the stream (or the logits) of what it reads.
    """

    modules: Mapping[str, nn.Module]
    run: Callable[[Any], torch.Tensor]

    def seen(
        self,
        hidden: torch.Tensor | None,
        replaced: Changes = MappingProxyType({}),
    ) -> Seen:
        """Run the part on hidden states, (..., features), with outputs of modules replaced."""
        with torch.no_grad(), recording(self.modules, {}, replaced) as record:
            result = self.run(hidden)
        return Seen(result, record.inputs, record.outputs)

    def weighted(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the modules with a matrix, and the matrix as (outputs, inputs)."""
        for name, module in self.modules.items():
            weight = module._parameters.get("weight")
            if weight is not None and weight.ndim == 2:
                yield name, outputs_first(weight, kind_of(module))

    def unknown(self) -> list[str]:
        """Return the parameters with several axes that belong to no module with a matrix."""
        weights = {f"{name}.weight" for name, _ in self.weighted()}
        names = [
            f"{name}.{key}"
            for name, module in self.modules.items()
            for key, parameter in module.named_parameters(recurse=False)
            if parameter.ndim > 1
        ]
        return [name for name in names if name not in weights]

    def read(self, hidden: torch.Tensor) -> tuple[Reading, ...]:
        """Return the readers of the stream.

        Raises:
            ModelError: no module with a weight reads the output of a norm.
        """
        size = hidden.shape[-1]
        # (features,), the same for each token.
        direction = _direction(size, hidden)
        # A vector far larger than the hidden states survives additions. Bounded functions of the
        # vector (attention, gates) are negligible, compared with it.
        far = _LARGE * _magnitude(hidden) * direction
        before = self.seen(hidden)
        after = self.seen(hidden + far)
        matrices = dict(self.weighted())
        readings = list[Reading]()
        plain = list[str]()
        for name, module in self.modules.items():
            reads = _moved_along(before.inputs, after.inputs, name, far)
            if reads and name in matrices:
                plain.append(name)
            # A norm with the far input: it must not depend on the scale of a large input.
            elif reads and _is_norm(module, reads[0]):
                readings.append(self._readers_of_norm(name, module, hidden, before))
        if plain:
            readings.append(Reading(tuple(plain)))
        return tuple(readings)

    def _readers_of_norm(
        self, name: str, norm: nn.Module, hidden: torch.Tensor, before: Seen
    ) -> Reading:
        """Return the readers of a norm, by an equal vector for every token."""
        x = before.inputs[name][0]
        output = before.outputs[name][0]
        # Another direction than the one that is added to the stream.
        constant = _direction(output.shape[-1], output, seed=1) * _magnitude(output)
        seen = self.seen(hidden, {name: _constantly(constant)})
        # By pattern, as the sample's tokens do not reach every expert.
        matrices = dict(self.weighted())
        patterns = {
            pattern_of(matrix)
            for matrix in matrices
            if any(_is_constant(x, constant) for x in seen.inputs.get(matrix, ()))
        }
        readers = tuple(matrix for matrix in matrices if pattern_of(matrix) in patterns)
        if not readers:
            raise ModelError(
                f"nothing with a weight reads what {name} computes; the model cannot be"
                " rotated",
            )
        return Reading(readers, name, _neutral(norm, x), _is_centered(norm, x))

    def written(
        self,
        hidden: torch.Tensor | None,
        size: int,
        skipped: Collection[str],
        normed: bool = False,
    ) -> tuple[str, ...]:
        """Return the writers of the stream.

        Args:
            hidden: input of the part.
            size: channels of the stream.
            skipped: names of modules that are no writers.
            normed: whether norms may come between writers and the stream.

        Raises:
            ModelError: a norm comes between a writer and the stream, and ``normed`` is False.
        """
        groups = dict[str, list[str]]()
        base = self.seen(hidden)
        for name, weight in self.weighted():
            # (outputs, inputs), but an embedding has its features on axis 1.
            wide = weight.shape[1 if is_table(self.modules[name]) else 0]
            if wide == size and name not in skipped:
                groups.setdefault(pattern_of(name), []).append(name)
        writers = list[str]()
        far = _LARGE * _magnitude(base.result) * _direction(size, base.result)

        def moved(output: torch.Tensor) -> torch.Tensor:
            return output + far.to(output)

        for names in groups.values():
            # All experts of a pattern together: each token reaches a few of them.
            seen = self.seen(hidden, dict.fromkeys(names, moved))
            if follows(base.result, seen.result, far):
                writers += names
                continue
            norm = self._norm_after(base, seen, far)
            if norm and not normed:
                raise ModelError(
                    f"{norm} normalizes what {names[0]} computes before it is added to"
                    " the residual stream; its gain belongs to channels, so that the"
                    " stream cannot be rotated: set r1 to false",
                )
            if norm:
                writers += names
        return tuple(writers)

    def _norm_after(self, base: Seen, seen: Seen, far: torch.Tensor) -> str:
        """Return the norm that reads a changed tensor; empty without a norm."""
        for name, module in self.modules.items():
            reads = _moved_along(base.inputs, seen.inputs, name, far)
            if reads and _is_norm(module, reads[0]):
                return name
        return ""

    def heads(
        self, hidden: torch.Tensor, writers: Collection[str]
    ) -> tuple[Heads, ...]:
        """Return the values of attention: equal values for all tokens make mixing the identity."""
        matrices = dict(self.weighted())
        all_heads = list[Heads]()
        base = self.seen(hidden)
        sources = [
            matrix
            for matrix in matrices
            if matrix in base.outputs and matrix not in writers
        ]
        for reader in writers:
            if reader not in base.inputs:
                continue
            # The attention module, which states the size of its heads, holds both projections.
            parent = reader.rpartition(".")[0]
            size = _head_size(self.modules.get(parent))
            if not size or matrices[reader].shape[1] % size:
                continue
            candidates = (name for name in sources if name.rpartition(".")[0] == parent)
            for source in candidates:
                starts = self._starts(hidden, base, source, reader, size)
                if starts:
                    all_heads.append(Heads(source, reader, starts, size))
                    break
        return tuple(all_heads)

    def _starts(
        self,
        hidden: torch.Tensor,
        base: Seen,
        source: str,
        reader: str,
        size: int,
    ) -> tuple[int, ...]:
        """Return the first output of each head of a layer; nothing if the inputs are no heads.

        Each output gets a point in the plane, at an angle of its own, by which the output is
        recognized whatever its factor.
        """
        # (batch, tokens, outputs).
        like = base.outputs[source][0]
        count = like.shape[-1]
        angles = torch.linspace(
            0.1, 1.4, count, dtype=torch.float64, device=like.device
        )
        signs = torch.sign(_direction(count, angles, seed=2))
        far = _LARGE * _magnitude(like).double() * signs
        # Two runs: the quotient of both coordinates is the angle, and a factor cancels.
        points = [far * angles.cos(), far * angles.sin()]
        coordinates = list[torch.Tensor]()
        for point in points:
            run = self.seen(hidden, {source: _constantly(point)}).inputs[reader][0]
            # (inputs of the reader,) of the last token: weights of attention sum up to 1, so that
            # equal values pass through unchanged.
            coordinates.append(run.reshape(-1, run.shape[-1])[-1].double())
        x, y = coordinates
        # The index of the output by its angle; 0 / 0 is NaN, an input that follows no output.
        index = (torch.atan(y / x) - 0.1) / (1.3 / max(count - 1, 1))
        rows = index.nan_to_num(nan=-1.0).round().long()
        if int(rows.min()) < 0 or int(rows.max()) >= count:
            return ()
        # Sums of several outputs have angles between those of single outputs.
        if bool((index - rows).abs().max() > 0.2):
            return ()
        # One factor per head at most: a rotation passes only what scales a head as a whole.
        # (heads of the reader, size).
        factors = (x / points[0][rows]).reshape(-1, size)
        rows = rows.reshape(-1, size)
        alike = (factors - factors[:, :1]).abs().max() <= 1e-3 * factors.abs().min()
        in_turn = (rows == rows[:, :1] + torch.arange(size, device=rows.device)).all()
        if bool(alike & in_turn):
            return tuple(rows[:, 0].unique().tolist())
        return ()


def follows(before: torch.Tensor, after: torch.Tensor, far: torch.Tensor) -> bool:
    """Return whether a difference is along a vector, up to rounding."""
    if before.shape != after.shape or before.shape[-1:] != far.shape:
        return False
    # (tokens, features); each token may have a factor of its own.
    moved = (after.float() - before.float()).reshape(-1, len(far))
    along = torch.outer(moved @ far / (far @ far), far)
    # A difference far smaller than the vector is rounding.
    if not along.norm() > 1e-3 * far.norm():
        return False
    return bool((moved - along).norm() <= _SMALL * along.norm())


def floats_of(module: nn.Module, recurse: bool = True) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of a module by name, floats as float32."""
    # Duplicates under all of their names, as functional_call replaces tensors by name.
    named = (
        *module.named_parameters(recurse=recurse, remove_duplicate=False),
        *module.named_buffers(recurse=recurse, remove_duplicate=False),
    )
    return {name: in_float32(tensor.detach()) for name, tensor in named}


def in_float32(value: Any) -> Any:
    """Convert floating tensors in nested lists and mappings to float32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: in_float32(item) for key, item in value.items()}
    # Not subclasses: a namedtuple cannot be made from an iterator.
    if type(value) in (list, tuple):
        return type(value)(in_float32(item) for item in value)
    return value


def is_table(module: nn.Module) -> bool:
    """Return whether a module looks up rows of its weight."""
    return isinstance(module, nn.Embedding)


def _is_norm(module: nn.Module, x: torch.Tensor) -> bool:
    """Return whether the output of a module is independent of the scale of a large input."""
    # A norm has no parts.
    if list(module.children()):
        return False
    try:
        output = _output(module, x.float())
        scaled = _output(module, (4 * x).float())
    except (RuntimeError, TypeError, ValueError):  # it takes more than this
        return False
    if not isinstance(output, torch.Tensor) or output.shape != x.shape:
        return False
    if not output.norm() > 0:
        return False
    return bool((output - scaled).norm() <= 1e-3 * output.norm())


def _is_centered(norm: nn.Module, x: torch.Tensor) -> bool:
    x = x.float()
    # Adding one number to all channels changes nothing if the mean is subtracted.
    output = _output(norm, x)
    moved = _output(norm, x + _magnitude(x))
    return bool((output - moved).norm() <= 1e-3 * output.norm())


def _output(module: nn.Module, x: torch.Tensor) -> Any:
    """Return the output of a module for an input in float32, with parameters in float32."""
    return functional_call(module, floats_of(module), (x,))


def _neutral(norm: nn.Module, x: torch.Tensor) -> float | None:
    """Return the value of a norm's weight that means a gain of 1."""
    tensors = floats_of(norm)
    # A norm without a gain (OLMo) has nothing to fold.
    if "weight" not in tensors:
        return None
    zeros = {
        name: torch.zeros_like(tensor) if tensor.ndim else tensor
        for name, tensor in tensors.items()
    }
    # With a weight of zeros, x * weight is zero, and x * (1 + weight) is not (Gemma).
    output = functional_call(norm, zeros, (x.float(),))
    return 0.0 if bool(output.any()) else 1.0


def _head_size(attention: nn.Module | None) -> int:
    # Values have a width of their own in DeepSeek's attention (v_head_dim).
    sizes = (getattr(attention, name, None) for name in ("v_head_dim", "head_dim"))
    return next((size for size in sizes if isinstance(size, int)), 0)


def _is_constant(x: torch.Tensor, constant: torch.Tensor) -> bool:
    if x.shape[-1:] != constant.shape:
        return False
    # The vector itself, which nothing has scaled or mixed.
    return bool((x.float() - constant).abs().max() <= 1e-5 * constant.abs().max())


def _direction(size: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return random numbers from a fixed seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(like.device)


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    """Return the root mean square; 1 for zero."""
    magnitude = x.float().square().mean().sqrt()
    # 1 in place of 0, by which a vector could not be scaled.
    return torch.where(magnitude > 0, magnitude, torch.ones_like(magnitude))


def _moved_along(
    before: Mapping[str, list[torch.Tensor]],
    after: Mapping[str, list[torch.Tensor]],
    name: str,
    far: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the second values of a module that differ from the first along a vector."""
    pairs = zip(before.get(name, ()), after.get(name, ()), strict=False)
    return [moved for value, moved in pairs if follows(value, moved, far)]


def _constantly(value: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    # A copy, as blocks may work in place on what modules return.
    return lambda output: value.to(output).expand_as(output).clone()
