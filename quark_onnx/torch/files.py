"""quantize_checkpoint: from a folder of weights to a folder of codes, one block of the model in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quark_onnx.errors import ConfigError, DataError, ModelError
from quark_onnx.progress import Progress
from quark_onnx.torch.algorithms.base import Layers
from quark_onnx.torch.algorithms.rotate import rotate_sources
from quark_onnx.torch.attention import hand_over, notes_of
from quark_onnx.torch.block import (
    check_apart,
    endings_of,
    has_two_streams,
    inside,
    measures,
    missing_data,
    needs_data,
    quantize_block,
    rotations_of,
    weight_alone,
)
from quark_onnx.torch.blockjournal import BlockJournal, Kept
from quark_onnx.torch.checkpoint import SHARD, Writer, other_files, read_json
from quark_onnx.torch.config import TorchConfig
from quark_onnx.torch.export import check_experts, described, tensors_of, untied
from quark_onnx.torch.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.float_weights import notes_on_stacks
from quark_onnx.torch.hidden_states import spilling
from quark_onnx.torch.layers import QuantizedLayer, kind_of, outputs_first
from quark_onnx.torch.layouts import Layout, check_config, layout_named
from quark_onnx.torch.memory import give_back
from quark_onnx.torch.observe import Scales, Watching
from quark_onnx.torch.quantize import chosen_layers
from quark_onnx.torch.quantized import check_finite
from quark_onnx.torch.report import TorchReport
from quark_onnx.torch.sources import Sources, empty, fill, missing_of
from quark_onnx.torch.structure import blocks_of, embedding_of, heads_of, within
from quark_onnx.torch.walk import Walk, batches, inference

#: Layers after which free memory is given back; it takes a while to get it again.
_KEPT = 16


@dataclass(frozen=True)
class Writing:
    """How a checkpoint is written.

    Attributes:
        pack_method: how nibbles are ordered in AMD Quark's layout, "reorder" or "order".
        max_shard: bytes of a file, at most.
        trust_code: run Python files that the checkpoint brings along.
        resume: a folder where each block that is done is kept, and found again by the same call; None keeps nothing.
        layout: how layers are stored, a key of ``quark_onnx.torch.layouts.LAYOUTS``.
        spill: a folder where hidden states are kept while they are not used; None keeps them in memory.
    """

    pack_method: str = "reorder"
    max_shard: int = SHARD
    trust_code: bool = False
    resume: Path | None = None
    layout: str = "quark"
    spill: Path | None = None

    def __post_init__(self) -> None:
        layout_named(self.layout, self.pack_method)
        if not self.max_shard > 0:
            raise ConfigError(f"max_shard is {self.max_shard} bytes; it must be more than 0")

    @property
    def form(self) -> Layout:
        """The layout that is named."""
        return layout_named(self.layout, self.pack_method)


def quantize_checkpoint(
    source: FloatCheckpoint | Path | str,
    output: Path | str,
    config: TorchConfig,
    data: Iterable[Any] | None = None,
    *,
    writing: Writing | None = None,
    progress: bool | None = None,
) -> TorchReport:
    """Quantize a checkpoint of a language model into another folder.

    In memory are one block of the model, what its layers become, and the hidden states of the data. Tensors that stay
    as they are, and all other files, are copied.

    Args:
        source: a Hugging Face folder with safetensors, or what has opened it.
        output: where the result goes; may exist only if it is empty.
        data: batches of token ids or dicts of keywords; needed where scales of activations are to be found.
        writing: how it is written; the defaults if None.
        progress: whether to show a progress bar; None shows it if stderr is a terminal.

    Raises:
        ConfigError: the folder is taken, a name matches no layer, no layer would be quantized, or the layout has no
            place for a format.
        DataError: data is needed and missing, or the model cannot be run on it.
        ModelError: a file is missing or damaged, or holds what is no number.
    """
    output, writing = Path(output), writing or Writing()
    layout = writing.form
    check_config(layout, config)
    config = layout.adapted(config)
    source = FloatCheckpoint.of(source, writing.trust_code)
    reader, model = source.reader, source.hand_over()
    chosen, kept = chosen_layers(model, config)
    measured = needs_data(chosen, config)
    if measured and data is None:
        raise DataError(missing_data(chosen))
    notes = notes_of(model, chosen, config, kept) + notes_on_stacks(model)
    report = TorchReport({name: spec for name, (_, spec) in chosen.items()}, kept, notes)
    others, content = other_files(source.folder), read_json(source.folder / "config.json")
    run = _Run(model, Sources(reader, model), config, chosen, report, layout, writing.spill)
    run.check()
    rotated = [rotate_sources(model, run.sources, each) for each in rotations_of(config)]
    if any(each.untied for each in rotated):
        content = untied(content)
    described(content, model, config, layout, report.quantized)  # fails here, and not at the end
    with ExitStack() as stack:
        writer = stack.enter_context(Writer(output, writing.max_shard))
        journal = BlockJournal(writing.resume, reader, config, repr(layout))
        parts = run.measured(data, journal, progress) if measured else run.unmeasured(progress)
        for name, tensor in parts:
            writer.add(layout.key(name), tensor)
            del tensor  # before the next one is made
        for name in run.sources.rest():
            writer.add(name, reader.get(name))
        writer.write_json("config.json", described(content, model, config, layout, report.quantized))
        for file in others:
            writer.copy(file)
    report.note_idle(config.algorithms)
    return report


@dataclass
class _Run:
    """A model on its way from weights to codes."""

    model: Any
    sources: Sources
    config: TorchConfig
    chosen: Layers
    report: TorchReport
    layout: Layout
    spill: Path | None

    def check(self) -> None:
        """Raise an error for what would fail at the end only: layers without a weight, and codes that do not fit."""
        lost = [name for name, _ in self.model.named_parameters() if name not in self.sources]
        if lost:
            self.report.notes.append(f"{self.sources.reader.folder} has no tensor for {', '.join(lost)}")
        check_experts(self.layout, self.model, {name: self._key(name) for name in self.chosen})
        for name, (module, spec) in self.chosen.items():
            weight = f"{name}.weight"
            if weight not in self.sources:
                raise ModelError(f"the checkpoint {self.sources.reader.folder} has no tensor for {weight}")
            kind = kind_of(module) or ""
            self.layout.check_layer(name, kind, spec, tuple(outputs_first(module.weight, kind).shape))

    def unmeasured(self, progress: bool | None) -> Iterator[tuple[str, Any]]:
        """Codes of weights, layer by layer; nothing is run."""
        names = [name for name, _ in self.model.named_modules()]
        with Progress(progress, len(names), "quantizing", "layer") as bar:
            for done, name in enumerate(names, 1):
                module = self.model.get_submodule(name)
                if name in self.chosen:
                    yield from self._one(name, module)
                    if done % _KEPT == 0:
                        give_back()
                else:
                    yield from self._untouched(name, module)
                bar.update(done)

    def _one(self, name: str, module: Any, scales: Scales | None = None) -> Iterator[tuple[str, Any]]:
        spec = self.chosen[name][1]
        fill(module, name, self.sources)
        weight = weight_alone(
            name, self.chosen, self.config, self.report, lambda each: self.sources.get(f"{each}.weight")
        )
        layer = QuantizedLayer(module, weight, spec, **(scales or Scales()).of(name))
        prefix = self._key(name)
        for end, tensor in self.layout.tensors(layer, name).items():
            yield f"{prefix}.{end}", tensor
        empty(module)

    def _untouched(self, name: str, module: Any) -> Iterator[tuple[str, Any]]:
        """A module's own tensors as the checkpoint has them; those of a parameter that is another's come once, if that
        stays as it is."""
        start = f"{name}." if name else ""
        own = [key for key, _ in module.named_parameters(recurse=False)]
        own += [key for key, _ in module.named_buffers(recurse=False) if key not in module._non_persistent_buffers_set]
        for key in own:
            twin = self.sources.tied.get(start + key)
            if start + key in self.sources and (twin is None or twin.rpartition(".")[0] in self.chosen):
                yield self.sources.key_of(start + key), self.sources.get(start + key)

    def measured(
        self, data: Iterable[Any] | None, journal: BlockJournal, progress: bool | None
    ) -> Iterator[tuple[str, Any]]:
        """Codes of weights and scales of activations, block by block."""
        blocks = blocks_of(self.model)
        if not blocks:
            raise ModelError("the model has no list of blocks; quantize it in memory by quantize_model")
        check_apart(self.model, blocks, self.config)
        outside = {name: each for name, each in self.chosen.items() if not any(within(name, b) for b in blocks)}
        samples = list(batches(data or ())) if measures(outside) or endings_of(self.config) else data or ()
        with ExitStack() as stack:
            stack.callback(hand_over(self.model, self.chosen))
            stack.enter_context(inference(self.model))
            folder = stack.enter_context(spilling(self.spill))
            self._fill(next(iter(blocks)), {})
            self._fill_front(blocks)
            with Watching({name: each for name, each in outside.items() if each[1].measures}) as watching:
                walk = self._walk(blocks, samples, folder)
            scales = watching.scales(self.config.least_of)
            later = {name: each for name, each in outside.items() if watching.unseen(name, scales)}
            if not endings_of(self.config):
                self._empty_front(blocks)
            for name, module in self.model.named_modules():
                if name not in later and not any(within(name, block) for block in blocks):
                    yield from self._outside(name, module, scales)
            if endings_of(self.config):
                yield from self._at_once(blocks, walk, list(samples), journal, progress)
            else:
                yield from self._blocks(blocks, walk, journal, progress)
            if later:
                yield from self._after(later, blocks, walk, samples)
        self.report.note_outside([name for name in outside if name in self.chosen], self.config.algorithms)

    def _walk(self, blocks: dict[str, Any], samples: Iterable[Any], folder: Path | None) -> Walk:
        try:
            return Walk(self.model, blocks, samples, folder)
        except DataError as error:
            front = [name for name in _front(self.model, blocks, self.chosen) if name]
            lost = (f"{name}.{each}" for name in front for each in missing_of(self.model.get_submodule(name)))
            if name := next(lost, None):
                folder = self.sources.reader.folder
                raise ModelError(f"the checkpoint {folder} has no tensor for {name}, and {error}") from error
            raise

    def _outside(self, name: str, module: Any, scales: Scales) -> Iterator[tuple[str, Any]]:
        """A module outside of the blocks: its codes, or its tensors as the checkpoint has them."""
        yield from self._one(name, module, scales) if name in self.chosen else self._untouched(name, module)

    def _after(
        self, layers: Layers, blocks: dict[str, Any], walk: Walk, samples: Iterable[Any]
    ) -> Iterator[tuple[str, Any]]:
        """Measure layers after the blocks; those that the data does not reach stay float."""
        self._fill_front(blocks)
        for name in heads_of(self.model):  # run here, unlike in front of the blocks
            fill(self.model.get_submodule(name), name, self.sources)
        with Watching(layers) as watching:
            walk.finish(self.model, samples)
        scales = watching.scales(self.config.least_of)
        self._empty_front(blocks)
        for name, (module, _) in layers.items():
            if watching.unseen(name, scales):
                self.report.stay_float(name)
                self.chosen = {other: each for other, each in self.chosen.items() if other != name}
            yield from self._outside(name, module, scales)

    def _fill_front(self, blocks: Iterable[str]) -> None:
        """Read all parameters outside of the blocks but those of heads that stay float."""
        for name, module in _front(self.model, blocks, self.chosen).items():
            fill(module, name, self.sources, recurse=False)
        embedding = embedding_of(self.model)
        if embedding is not None and missing_of(embedding):
            raise ModelError(f"the checkpoint {self.sources.reader.folder} has no tensor for the embedding of tokens")

    def _empty_front(self, blocks: Iterable[str]) -> None:
        for module in _front(self.model, blocks, self.chosen).values():
            empty(module, recurse=False)

    def _blocks(
        self, blocks: dict[str, Any], walk: Walk, journal: BlockJournal, progress: bool | None
    ) -> Iterator[tuple[str, Any]]:
        if has_two_streams(self.chosen, self.config):
            walk.split()
        journal.begin(walk.tensors())
        with Progress(progress, len(blocks) * len(walk), "quantizing", "sample") as bar:
            for index, (name, block) in enumerate(blocks.items()):
                part = inside(self.chosen, name)
                found = journal.find(index)
                if found is None:
                    self._fill(name, part)
                    before = len(self.report.outcomes)
                    for done in quantize_block(self.model, name, part, walk, self.config, self.report):
                        bar.update(index * len(walk) + done)
                    tensors = self._named(name, part, tensors_of(block, self.layout))
                    journal.keep(index, tensors, Kept.of(part, self.report, before), walk.states)
                else:
                    tensors, kept = found
                    kept.tell(self.report)
                    self._skip(block, name)
                    walk.states = journal.hidden(index, walk.states)
                    bar.update((index + 1) * len(walk))
                yield from sorted(tensors.items())  # as a journal hands them back in an order of its own
                empty(block)
                _drop(self.model, part)
                give_back()

    def _at_once(
        self, blocks: dict[str, Any], walk: Walk, samples: list[Any], journal: BlockJournal, progress: bool | None
    ) -> Iterator[tuple[str, Any]]:
        """All blocks stay in memory until algorithms have worked on them together; what these have reached is kept."""
        if has_two_streams(self.chosen, self.config):
            walk.split()
        journal.begin(walk.tensors())
        with Progress(progress, len(blocks) * len(walk), "quantizing", "sample") as bar:
            for index, name in enumerate(blocks):
                part = inside(self.chosen, name)
                self._fill(name, part)
                for done in quantize_block(self.model, name, part, walk, self.config, self.report):
                    bar.update(index * len(walk) + done)
        del walk
        for name in heads_of(self.model):
            fill(self.model.get_submodule(name), name, self.sources)
        for index, each in enumerate(endings_of(self.config)):
            self.report.outcomes += each(self.model, self.chosen, samples, progress, journal.state(index))
        for name, block in blocks.items():
            tensors = self._named(name, inside(self.chosen, name), tensors_of(block, self.layout))
            yield from sorted(tensors.items())
            empty(block)

    def _fill(self, name: str, layers: Layers) -> None:
        block = self.model.get_submodule(name)
        fill(block, name, self.sources)
        if missing := missing_of(block):
            raise ModelError(f"the checkpoint {self.sources.reader.folder} has no tensor for {name}.{missing[0]}")
        for each, (module, spec) in layers.items():
            if spec.weight is not None:
                check_finite(module.weight, each)

    def _key(self, layer: str) -> str:
        """How the result calls a layer."""
        return self.sources.key_of(f"{layer}.weight").removesuffix(".weight")

    def _named(self, block: str, layers: Layers, tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """The tensors of a block by the names that the checkpoint has for them."""
        found = dict[str, Any]()
        for key, tensor in tensors:
            owner, _, end = f"{block}.{key}".rpartition(".")
            if owner in layers:
                key = f"{self._key(owner)}.{end}"
            else:
                if (name := f"{block}.{key}") in self.sources:
                    tensor = _as_stored(tensor, self.sources.get(name))
                key = self.sources.key_of(name)
            found[key] = tensor
        return found

    def _skip(self, block: Any, name: str) -> None:
        """Count a block's tensors as read."""
        for key, _ in block.named_parameters():
            if f"{name}.{key}" in self.sources:
                self.sources.mark(f"{name}.{key}")


def _as_stored(tensor: Any, stored: Any) -> Any:
    """A tensor of the type that it has in the checkpoint; the very same if no algorithm has changed it."""
    return stored if torch.equal(tensor, stored.to(tensor.dtype)) else tensor.to(stored.dtype)


def _front(model: Any, blocks: Iterable[str], chosen: Layers) -> dict[str, Any]:
    """The modules outside of the blocks with parameters of their own; heads that stay float are not run."""
    heads = [name for name in heads_of(model) if name not in chosen and not _looks_up(model, name)]
    own = {name: each for name, each in model.named_modules() if name not in heads and each._parameters}
    return {name: module for name, module in own.items() if not any(within(name, block) for block in blocks)}


def _looks_up(model: Any, name: str) -> bool:
    """Return whether a head is an embedding, which looks up tokens in front of the blocks as well."""
    return isinstance(model.get_submodule(name), torch.nn.Embedding)


def _drop(model: Any, layers: Layers) -> None:
    """Let go of what has been written, and of the float weights that it was made of."""
    for name, (module, _) in layers.items():
        empty(module)
        layer = model.get_submodule(name)
        if isinstance(layer, QuantizedLayer):
            layer.quantized = None
