"""FileRun: convert a float checkpoint to a quantized one, block by block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quark_onnx.common.errors import DataError, ModelError
from quark_onnx.common.progress import Progress
from quark_onnx.torch.calibration.block_stream import (
    BlockStream,
    NotWalkable,
    batches,
    inference,
    moved,
    run_whole,
)
from quark_onnx.torch.calibration.hidden_states import spilling
from quark_onnx.torch.calibration.observers import ActivationObservers, Scales
from quark_onnx.torch.checkpoints.export import check_experts, tensors_of
from quark_onnx.torch.checkpoints.layouts import Layout
from quark_onnx.torch.checkpoints.parameter_sources import (
    Sources,
    empty,
    fill,
    missing_of,
    move_filled,
)
from quark_onnx.torch.checkpoints.read_ahead import ReadAhead
from quark_onnx.torch.checkpoints.stored_tensor import StoredTensor
from quark_onnx.torch.checkpoints.unsaved import compute_unsaved
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.quantized_tensor import Quantized, check_finite
from quark_onnx.torch.models.attention import install_attention_hooks
from quark_onnx.torch.models.heads import heads_of
from quark_onnx.torch.models.language import outside_language
from quark_onnx.torch.models.names import (
    outside_of,
    within_any,
)
from quark_onnx.torch.models.quantized_layer import (
    Layers,
    QuantizedLayer,
    kind_of,
    outputs_first,
)
from quark_onnx.torch.models.structure import blocks_of, embedding_of
from quark_onnx.torch.pipelines.block import (
    check_unshared,
    finalizers,
    inside,
    needs_float_reference,
    quantize_block,
    quantize_data_free,
)
from quark_onnx.torch.pipelines.report import TorchReport
from quark_onnx.torch.pipelines.resume import BlockJournal, Lengths, StoredBlock
from quark_onnx.torch.pipelines.written_names import (
    is_copied,
    mark_written,
    untouched_names,
)
from quark_onnx.torch.runtime.devices import room_for_states
from quark_onnx.torch.runtime.memory import release_memory

_CPU = torch.device("cpu")
#: Number of layers between releases of free memory; allocating it again is slow.
_KEPT = 16


@dataclass
class FileRun:
    """Conversion of a float checkpoint to a quantized one."""

    model: Any
    sources: Sources
    config: TorchConfig
    chosen: dict[str, tuple[Any, LayerSpec]]
    report: TorchReport
    layout: Layout
    spill: Path | None
    device: Any = _CPU
    #: Reads the codes of a stored tensor, if the checkpoint is quantized; codes are kept if the
    #: requested format is the same.
    codes_of: Callable[[str], Quantized | None] | None = None

    def __post_init__(self) -> None:
        # parameters with fixed values, which transformers leaves out of files
        compute_unsaved(self.model, self.sources)
        # parameters are empty, and are moved when they are read
        if self.device != _CPU:
            move_filled(self.model, self.device)

    def _fill_module(self, module: Any, name: str, *, recurse: bool = True) -> None:
        """Read the empty parameters of a module onto the device.

        Args:
            module: the module; it is changed in place.
            name: full name of the module, empty for the model.
            recurse: whether to include the children.

        Raises:
            ModelError: a stored tensor has another shape, or is not a float tensor.
        """
        device = None if self.device == _CPU else self.device
        fill(module, name, self.sources, recurse=recurse, device=device)

    def check(self) -> None:
        """Raise an error for problems that would otherwise surface at the end of a run.

        Raises:
            ModelError: a parameter that text needs has no stored tensor, a stored tensor has
                another shape than the parameter, or the layout cannot store the codes of a layer.
        """
        names = dict(self.model.named_parameters())
        for name, parameter in names.items():
            self.sources.check_shape(name, parameter)
        lost = [name for name in names if name not in self.sources]
        # only a note: parameters of parts that text does not run may be missing
        outside = set(outside_language(self.model)) - set(heads_of(self.model))
        needed = [name for name in lost if name.rpartition(".")[0] not in outside]
        if needed:
            raise ModelError(
                f"the checkpoint {self.sources.reader.folder} has no tensor for"
                f" {', '.join(needed[:3])}{' and others' if len(needed) > 3 else ''}, and"
                " the result would compute with random values; complete the folder"
            )
        if lost:
            self.report.notes.append(
                f"{self.sources.reader.folder} has no tensor for {', '.join(lost)}",
            )
        check_experts(
            self.layout,
            self.model,
            {name: self._key(name) for name in self.chosen},
        )
        for name, (module, spec) in self.chosen.items():
            weight = f"{name}.weight"
            if weight not in self.sources:
                raise ModelError(
                    f"the checkpoint {self.sources.reader.folder} has no tensor for"
                    f" {weight}",
                )
            kind = kind_of(module) or ""
            self.layout.check_layer(
                name,
                kind,
                spec,
                tuple(outputs_first(module.weight, kind).shape),
            )

    def unmeasured(self, progress: bool | None) -> Iterator[tuple[str, Any]]:
        """Yield tensors layer by layer, without running the model.

        Args:
            progress: whether to show a progress bar; None decides by the terminal.

        Yields:
            Pairs of a name in the output checkpoint and a tensor.
        """
        names = [*dict(self.model.named_modules())]
        with (
            Progress(progress, len(names), "quantizing", "layer") as bar,
            ReadAhead() as ahead,
        ):
            for done, name in enumerate(names, 1):
                module = self.model.get_submodule(name)
                # reading and quantizing overlap
                self._read_ahead(ahead, names[done : done + 1], recurse=False)
                if name in self.chosen:
                    yield from self._one(name, module)
                    if done % _KEPT == 0:
                        release_memory()
                else:
                    yield from self._untouched(name, module)
                bar.update(done)

    def _one(
        self,
        name: str,
        module: Any,
        scales: Scales | None = None,
    ) -> Iterator[tuple[str, Any]]:
        spec = self.chosen[name][1]
        self._fill_module(module, name)
        self._keep_codes(name, module)
        weight = quantize_data_free(
            name,
            self.chosen,
            self.config,
            self.report,
            # NVFP4 needs the weights of fused layers, whose modules are empty at this time
            lambda each: self.sources.get(f"{each}.weight").to(self.device),
        )
        layer = QuantizedLayer(module, weight, spec, **(scales or Scales()).of(name))
        prefix = self._key(name)
        # a generator: the consumer writes each tensor before the next is computed
        for end, tensor in self.layout.tensors(layer, name).items():
            yield f"{prefix}.{end}", tensor
        self._mark(name, module)
        empty(module)

    def _untouched(self, name: str, module: Any) -> Iterator[tuple[str, Any]]:
        """Yield the tensors of a float module as stored.

        A tied parameter is yielded once, if its twin stays float.

        Args:
            name: full name of the module, empty for the model.
            module: the module; children are not included.

        Yields:
            Pairs of a stored name and a stored tensor. Tensors that are copied from file to file
            and buffers that the checkpoint lacks are left out.
        """
        names = untouched_names(name, module, self.sources, self.chosen, self.config)
        for key in names:
            yield self.sources.key_of(key), self.sources.get(key)
            self.sources.mark(key)

    def measured(
        self,
        data: Iterable[Any] | None,
        journal: BlockJournal,
        progress: bool | None,
    ) -> Iterator[tuple[str, Any]]:
        """Yield tensors block by block, with calibrated activation scales.

        Args:
            data: the calibration samples.
            journal: stores finished blocks, so that a run can resume.
            progress: whether to show a progress bar.
        """
        blocks = blocks_of(self.model)
        check_unshared(self.model, blocks, self.config)
        outside = outside_of(self.chosen, blocks)
        samples = list(batches(data or ()))
        with ExitStack() as stack:
            # the hooks are removed in the end, also after an error
            stack.callback(install_attention_hooks(self.model, self.chosen))
            stack.enter_context(inference(self.model))
            folder = stack.enter_context(spilling(self.spill))
            try:
                walk, watching = self._walk(blocks, outside, samples, folder)
            except NotWalkable as error:
                if self.config.algorithms:
                    raise
                yield from self._whole(blocks, samples, str(error))
                return
            scales = watching.scales(self.config.least_of)
            # heads and the like, which run after the last block
            later = {
                name: each
                for name, each in outside.items()
                if watching.unseen(name, scales)
            }
            for name, module in self.model.named_modules():
                if name not in later and not within_any(name, blocks):
                    yield from self._outside(name, module, scales)
            # algorithms on the full model need all blocks, with codes and float weights, in memory
            if finalizers(self.config):
                self._at_once(blocks, walk, journal, progress)
                # these algorithms run the whole model, which needs the memory
                if not later:
                    walk.release()
                yield from self._finalized(blocks, samples, journal, progress)
            else:
                yield from self._blocks(blocks, walk, journal, progress)
            if later:
                yield from self._after(later, blocks, walk, samples)
        self.report.note_outside(
            # layers that stay float have left ``chosen``
            [value for value in outside if value in self.chosen],
            self.config.algorithms,
        )

    def _walk(
        self,
        blocks: dict[str, Any],
        outside: Layers,
        samples: list[Any],
        folder: Path | None,
    ) -> tuple[BlockStream, ActivationObservers]:
        """Run the modules before the blocks on the data, and observe their layers.

        Args:
            blocks: the blocks by name, in the order of execution.
            outside: the layers to quantize outside of the blocks.
            samples: the calibration batches.
            folder: folder for hidden states; None keeps them in memory.

        Returns:
            The hidden states at the input of the first block, and the observers of the layers that
            have run. The modules outside of the blocks are empty again.

        Raises:
            NotWalkable: the model has no blocks, or does not run them one after the other.
            ModelError: the checkpoint lacks a parameter that is needed.
        """
        if not blocks:
            raise NotWalkable("the model has no list of blocks")
        # recording runs the first block once to learn the form of its output
        self._fill(next(iter(blocks)), {})
        heads = [value for value in heads_of(self.model) if value not in self.chosen]
        # heads that stay float run only after the last block, unless they are embeddings too
        heads = [
            name
            for name in heads
            if not isinstance(self.model.get_submodule(name), torch.nn.Embedding)
        ]
        self._fill_outside(blocks, heads)
        with ActivationObservers(
            # layers without measured scales need no hooks
            {name: each for name, each in outside.items() if each[1].measures},
        ) as watching:
            walk = self._recorded(blocks, samples, folder)
        walk.check_once(self.model)
        self._empty_outside(blocks)
        return walk, watching

    def _recorded(
        self,
        blocks: dict[str, Any],
        samples: list[Any],
        folder: Path | None,
    ) -> BlockStream:
        """Record the inputs of the blocks.

        Args:
            blocks: the blocks by name, in the order of execution.
            samples: the calibration batches.
            folder: folder for hidden states; None keeps them in memory.

        Raises:
            ModelError: the run failed because the checkpoint lacks a parameter.
        """
        try:
            return BlockStream(
                self.model,
                blocks,
                samples,
                folder,
                room_for_states(self.device),
            )
        except DataError as error:
            # an empty parameter fails with an error of torch that names no tensor
            lost = self._lost_outside(blocks)
            if lost is None:
                raise
            raise ModelError(
                f"the checkpoint {self.sources.reader.folder} has no tensor for {lost}:"
                f" {error}",
            ) from error

    def _lost_outside(self, blocks: Iterable[str]) -> str | None:
        """Return a parameter outside of the blocks that the checkpoint lacks, or None."""
        for name, module in _outside(self.model, blocks).items():
            for end in missing_of(module):
                if f"{name}.{end}" not in self.sources:
                    return f"{name}.{end}"
        return None

    def _whole(
        self,
        blocks: dict[str, Any],
        samples: list[Any],
        why: str,
    ) -> Iterator[tuple[str, Any]]:
        """Calibrate a model that cannot run block by block, with all weights loaded.

        A layer in a block without calibration data is quantized with weights alone; a layer outside
        of the blocks stays float.

        Args:
            blocks: the blocks by name; empty if the model has none.
            samples: the calibration batches.
            why: reason against running block by block, for the report.

        Yields:
            Pairs of a name in the output checkpoint and a tensor.

        Raises:
            ModelError: the checkpoint lacks a parameter.
        """
        self.report.notes.append(f"all weights were in memory at once: {why}")
        self._fill_module(self.model, "")
        if missing := missing_of(self.model):
            raise ModelError(
                f"the checkpoint {self.sources.reader.folder} has no tensor for"
                f" {missing[0]}",
            )
        for name, (module, _) in self.chosen.items():
            # NaN in one weight would reach the scales of all later layers
            check_finite(module.weight, name)
        with ActivationObservers(self.chosen) as watching:
            # batches come from the caller on any device
            run_whole(self.model, [moved(each, self.device) for each in samples])
        scales = watching.scales(self.config.least_of)
        self.report.note_borrowing(watching.borrowing)
        modules = list(self.model.named_modules())
        unseen = [name for name in self.chosen if watching.unseen(name, scales)]
        for name in unseen:
            # the same rule as in ``block.finish`` and ``in_memory``
            if within_any(name, blocks):
                self.chosen[name] = (
                    self.chosen[name][0],
                    self.report.weight_only(name),
                )
            else:
                self._stay_float(name)
        for name, module in modules:
            yield from self._outside(name, module, scales)

    def _stay_float(self, name: str) -> None:
        self.report.stay_float(name)
        self.chosen.pop(name)

    def _outside(
        self,
        name: str,
        module: Any,
        scales: Scales,
    ) -> Iterator[tuple[str, Any]]:
        """Yield the codes or the stored tensors of a module outside of the blocks.

        Args:
            name: full name of the module, empty for the model.
            module: the module; children are not included.
            scales: activation scales of the observed layers.

        Yields:
            Pairs of a name in the output checkpoint and a tensor.
        """
        if name in self.chosen:
            yield from self._one(name, module, scales)
        else:
            yield from self._untouched(name, module)

    def _after(
        self,
        layers: Layers,
        blocks: dict[str, Any],
        walk: BlockStream,
        samples: Iterable[Any],
    ) -> Iterator[tuple[str, Any]]:
        """Calibrate layers after the blocks; layers that stay inactive stay float.

        Args:
            layers: the layers after the last block, mostly heads.
            blocks: the blocks by name; their final hidden states are in ``walk``.
            walk: the hidden states after the last block.
            samples: the calibration batches.

        Yields:
            Pairs of a name in the output checkpoint and a tensor.
        """
        # the modules before the blocks run again, up to the last head
        self._fill_outside(blocks)
        with ActivationObservers(layers) as watching:
            walk.finish(self.model, samples)
        scales = watching.scales(self.config.least_of)
        self._empty_outside(blocks)
        for name, (module, _) in layers.items():
            if watching.unseen(name, scales):
                self._stay_float(name)
            yield from self._outside(name, module, scales)

    def _fill_outside(
        self,
        blocks: Iterable[str],
        without: Collection[str] = (),
    ) -> None:
        """Read the parameters outside of the blocks, except those of given modules.

        Args:
            blocks: names of the blocks.
            without: full names of modules outside of the blocks that stay empty.

        Raises:
            ModelError: the checkpoint lacks the embedding of tokens.
        """
        for name, module in _outside(self.model, blocks).items():
            if name not in without:
                self._fill_module(module, name, recurse=False)
        embedding = embedding_of(self.model)
        # without an embedding no token can be run; other modules may not be needed
        if embedding is not None and missing_of(embedding):
            raise ModelError(
                f"the checkpoint {self.sources.reader.folder} has no tensor for the"
                " embedding of tokens",
            )

    def _empty_outside(self, blocks: Iterable[str]) -> None:
        for module in _outside(self.model, blocks).values():
            empty(module, recurse=False)

    def _blocks(
        self,
        blocks: dict[str, Any],
        walk: BlockStream,
        journal: BlockJournal,
        progress: bool | None,
    ) -> Iterator[tuple[str, Any]]:
        if needs_float_reference(self.chosen, self.config):
            walk.split()
        journal.begin(walk.tensors())
        names = list(blocks)
        with (
            Progress(progress, len(blocks), "quantizing", "block") as bar,
            ReadAhead() as ahead,
        ):
            for index, (name, block) in enumerate(blocks.items()):
                part = inside(self.chosen, name)
                found = journal.find(index)
                # blocks that an earlier run has finished are read from the journal, until the first
                # missing one
                if found is None:
                    # the entries from here on belong to the block; filling it finds kept codes
                    before = Lengths.of(self.report)
                    self._fill(name, part)
                    self._read_ahead(ahead, names[index + 1 : index + 2])
                    for done in quantize_block(
                        self.model,
                        name,
                        part,
                        walk,
                        self.config,
                        self.report,
                    ):
                        bar.update(index + done / (len(walk) + 1))
                    tensors = self._named(name, part, tensors_of(block, self.layout))
                    journal.keep(
                        index,
                        tensors,
                        StoredBlock.of(part, self.report, before),
                        walk.states,
                    )
                else:
                    tensors, kept = found
                    kept.tell(self.report)
                    # ``_fill`` would have marked them; their tensors are in the journal
                    self._mark(name, block)
                    states = journal.hidden(index, walk.states)
                    walk.states = [state.to(self.device) for state in states]
                    bar.update(index + 1, skipped=True)
                # since a journal returns tensors in a different order
                yield from sorted(tensors.items())
                bar.update(index + 1)
                empty(block)
                # QuantizedLayers have replaced the layers in the block, which still hold float
                # weights
                _drop(self.model, part)
                release_memory()

    def _at_once(
        self,
        blocks: dict[str, Any],
        walk: BlockStream,
        journal: BlockJournal,
        progress: bool | None,
    ) -> None:
        """Quantize with every block in memory, for algorithms on the full model.

        Args:
            blocks: the blocks by name, in the order of execution.
            walk: the hidden states at the input of the first block, which become those after the
                last one.
            journal: journal of the run.
            progress: whether to show a progress bar; None decides by the terminal.
        """
        if needs_float_reference(self.chosen, self.config):
            walk.split()
        journal.begin(walk.tensors())
        names = list(blocks)
        with (
            Progress(progress, len(blocks), "quantizing", "block") as bar,
            ReadAhead() as ahead,
        ):
            for index, name in enumerate(names):
                part = inside(self.chosen, name)
                self._fill(name, part)
                self._read_ahead(ahead, names[index + 1 : index + 2])
                for done in quantize_block(
                    self.model,
                    name,
                    part,
                    walk,
                    self.config,
                    self.report,
                ):
                    bar.update(index + done / (len(walk) + 1))
                bar.update(index + 1)

    def _finalized(
        self,
        blocks: dict[str, Any],
        samples: list[Any],
        journal: BlockJournal,
        progress: bool | None,
    ) -> Iterator[tuple[str, Any]]:
        """Run the algorithms on the full model.

        The journal keeps the state of these algorithms.

        Args:
            blocks: the quantized blocks by name.
            samples: the calibration batches, on which the algorithms run the model.
            progress: whether to show a progress bar; None decides by the terminal.

        Yields:
            Pairs of a name in the output checkpoint and a tensor, sorted by name within each block,
            after the last algorithm has run.
        """
        self._fill_outside(blocks)
        for index, each in enumerate(finalizers(self.config)):
            self.report.outcomes += each(
                self.model,
                self.chosen,
                samples,
                progress,
                journal.state(index),
            )
        for name, block in blocks.items():
            tensors = self._named(
                name,
                inside(self.chosen, name),
                tensors_of(block, self.layout),
            )
            yield from sorted(tensors.items())
            empty(block)

    def _read_ahead(
        self,
        ahead: ReadAhead,
        names: Iterable[str],
        *,
        recurse: bool = True,
    ) -> None:
        """Begin to read the tensors of modules that come next.

        Args:
            ahead: the thread that reads.
            recurse: whether to include the children.
        """
        for name in names:
            module = self.model.get_submodule(name)
            # a parameter may be made of several stored tensors (stacked or split experts)
            # codes of another format are decoded, and quantized anew
            parts = list[StoredTensor]()
            for key, _ in module.named_parameters(recurse=recurse):
                parts += self.sources.stored_parts(f"{name}.{key}" if name else key)
            if parts:
                ahead.start(parts)

    def _fill(self, name: str, layers: Layers) -> None:
        block = self.model.get_submodule(name)
        self._fill_module(block, name)
        self._mark(name, block)
        if missing := missing_of(block):
            raise ModelError(
                f"the checkpoint {self.sources.reader.folder} has no tensor for"
                f" {name}.{missing[0]}",
            )
        for each, (module, spec) in layers.items():
            if spec.weight is not None:
                check_finite(module.weight, each)
                self._keep_codes(each, module)

    def _keep_codes(self, name: str, module: Any) -> None:
        """Let a layer keep the checkpoint's codes if the format is as requested.

        The codes are set as ``module.kept_codes``, where ``block.weight_of`` finds them.

        Args:
            name: full name of the layer.
            module: the layer; without kept codes it is not changed.
        """
        if self.codes_of is None:
            return
        codes = self.codes_of(self.sources.key_of(f"{name}.weight"))
        wanted = self.chosen[name][1].weight
        if codes is None or wanted is None or _format(codes.spec) != _format(wanted):
            return
        # the requested spec, which has a calibrator and the like that the file does not
        module.kept_codes = replace(codes, spec=wanted)
        self.report.kept_codes.append(name)

    def _key(self, layer: str) -> str:
        """Return the name of a layer in the output checkpoint."""
        return self.sources.key_of(f"{layer}.weight").removesuffix(".weight")

    def _named(
        self,
        block: str,
        layers: Layers,
        tensors: Iterable[tuple[str, Any]],
    ) -> dict[str, Any]:
        """Return the tensors of a block under the checkpoint's names.

        Args:
            block: full name of the block.
            layers: the quantized layers of the block, by full name.
            tensors: pairs of a name below the block and a tensor.

        Returns:
            Tensors on the CPU by their names in the output checkpoint. Float tensors have the
            dtype of the checkpoint; tensors that are copied from file to file are left out.
        """
        found = dict[str, Any]()
        for key, tensor in tensors:
            tensor = tensor.cpu()
            # a key ends with the part of a layer: weight, weight_scale, ...
            owner, _, end = f"{block}.{key}".rpartition(".")
            if owner in layers:
                key = f"{self._key(owner)}.{end}"
            else:
                name = f"{block}.{key}"
                if self._is_copied(name):
                    continue
                if name in self.sources:
                    # norms of a bfloat16 checkpoint may be float32 in memory, or the other way
                    # round
                    tensor = _as_stored(tensor, self.sources.get(name))
                key = self.sources.key_of(name)
            found[key] = tensor
        return found

    def _is_copied(self, name: str) -> bool:
        """Return whether the stored tensors of a converted parameter are copied."""
        return is_copied(name, self.sources, self.chosen, self.config)

    def _mark(self, name: str, module: Any) -> None:
        mark_written(name, module, self.sources, self.chosen, self.config)


def _format(spec: TensorSpec) -> tuple[Any, ...]:
    """Return the fields of a specification that decide whether codes are compatible."""
    # calibrators and names do not change what codes mean
    return (spec.dtype, spec.symmetric, spec.per_channel, spec.group)


def _as_stored(tensor: Any, stored: Any) -> Any:
    """Convert a tensor to its stored dtype.

    The stored tensor is returned if the values are equal.

    Args:
        tensor: float tensor of the model.
        stored: the same tensor as the checkpoint has it.

    Returns:
        A tensor with the dtype of ``stored``.
    """
    if torch.equal(tensor, stored.to(tensor.dtype)):
        return stored
    return tensor.to(stored.dtype)


def _outside(model: Any, blocks: Iterable[str]) -> dict[str, Any]:
    """Return the modules with parameters outside of the blocks."""
    # own parameters, not those of children
    own = {name: module for name, module in model.named_modules() if module._parameters}
    return outside_of(own, blocks)


def _drop(model: Any, layers: Layers) -> None:
    """Free the written tensors of layers, and the float weights.

    Args:
        model: the model, in which quantized layers have replaced the float layers.
        layers: float layers by name; they are emptied in place.
    """
    for name, (module, _) in layers.items():
        empty(module)
        layer = model.get_submodule(name)
        if isinstance(layer, QuantizedLayer):
            # the codes are with the consumer or on disk by now
            layer.quantized = None
