"""FileRun: convert a float checkpoint to a quantized one, block by block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from calibrators.onnx_runtime.freed_memory import return_freed_memory
from quark_onnx.common.errors import DataError
from quark_onnx.torch.calibration.block_stream import (
    BlockStream,
    moved,
)
from quark_onnx.torch.calibration.hidden_states import spilling
from quark_onnx.torch.calibration.observers import Scales
from quark_onnx.torch.checkpoints.atomic_file import State
from quark_onnx.torch.checkpoints.export import check_experts, tensors_of
from quark_onnx.torch.checkpoints.layouts import Layout
from quark_onnx.torch.checkpoints.parameter_sources import (
    Sources,
    compute_unsaved,
    empty,
    fill,
    missing_of,
    move_filled,
)
from quark_onnx.torch.checkpoints.read_ahead import ReadAhead
from quark_onnx.torch.checkpoints.safetensors_io import Writer
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats.quantized_tensor import Quantized, check_finite
from quark_onnx.torch.models.attention import install_attention_hooks
from quark_onnx.torch.models.heads import heads_of
from quark_onnx.torch.models.language import outside_language
from quark_onnx.torch.models.names import (
    joined,
    outside_of,
)
from quark_onnx.torch.models.quantized_layer import (
    Layers,
    QuantizedLayer,
    inputs_of,
    kind_of,
    outputs_first,
)
from quark_onnx.torch.models.structure import embedding_of
from quark_onnx.torch.pipelines.block import (
    finalizers,
    layers_in,
    quantize_data_free,
)
from quark_onnx.torch.pipelines.flow import QuantizationRun
from quark_onnx.torch.pipelines.resume import BlockJournal, Lengths, StoredBlock
from quark_onnx.torch.pipelines.written_names import (
    is_copied,
    mark_written,
    untouched_names,
)
from quark_onnx.torch.runtime.devices import room_for_states
from quark_onnx.torch.runtime.safetensors_header import StoredTensor

_CPU = torch.device("cpu")
#: Number of layers between releases of free memory; allocating it again is slow.
_KEPT = 16


@dataclass
class FileRun(QuantizationRun):
    """Conversion of a float checkpoint to a quantized one, with one block in memory at a time.

    Attributes:
        sources: the tensors of the float checkpoint.
        layout: the layout of the quantized checkpoint.
        journal: stores finished blocks, so that a run can resume.
        ahead: reads the tensors that come next.
        spill: folder for hidden states that are not in use; None keeps them in memory.
        device: the device that runs blocks and computes codes.
        codes_of: reads the codes of a stored tensor, if the checkpoint is quantized; codes are kept
            if the requested format is the same.
        writer: the quantized checkpoint; None if another process writes it.
    """

    sources: Sources
    layout: Layout
    journal: BlockJournal
    ahead: ReadAhead
    spill: Path | None = None
    device: Any = _CPU
    codes_of: Callable[[str], Quantized | None] | None = None
    writer: Writer | None = None

    def __post_init__(self) -> None:
        # parameters with fixed values, which transformers leaves out of files
        compute_unsaved(self.model, self.sources)
        # parameters are empty, and are moved when they are read
        if self.device != _CPU:
            move_filled(self.model, self.device)
        #: folder for hidden states while the model is calibrated
        self._states_folder: Path | None = None
        #: length of the lists of the report before the current block
        self._before = Lengths.of(self.report)
        #: quantized blocks that algorithms on the full model may change
        self._unwritten = list[str]()
        self._layers_written = 0

    def _fill_module(self, module: Any, name: str, *, recurse: bool = True) -> None:
        """Read the empty parameters of a module onto the device, in place."""
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
            raise self.sources.missing(
                f"{', '.join(needed[:3])}{' and others' if len(needed) > 3 else ''}, and"
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
        # before single layers are checked: the message is about all of them
        self.layout.check_groups(
            {
                name: (spec, inputs_of(module))
                for name, (module, spec) in self.chosen.items()
            }
        )
        for name, (module, spec) in self.chosen.items():
            weight = f"{name}.weight"
            if weight not in self.sources:
                raise self.sources.missing(weight)
            kind = kind_of(module) or ""
            self.layout.check_layer(
                name,
                kind,
                spec,
                tuple(outputs_first(module.weight, kind).shape),
            )

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor by its name in the layout of AMD Quark."""
        if self.writer is not None:
            self.writer.add(self.layout.key(name), tensor.cpu())

    def write_rest(self) -> None:
        """Write the tensors of the checkpoint that are copied.

        They belong to no parameter of the model, or to a converted one that stays float.
        """
        if self.writer is not None:
            for name in self.sources.rest():
                self.writer.add(name, self.sources.reader.get(name))

    def module_names(self) -> list[str]:
        """Return all modules: the tensors of float modules are written, too."""
        return [name for name, _ in self.model.named_modules()]

    def hand_over(self, name: str, scales: Scales) -> None:
        """Write the codes of a layer, or the stored tensors of a float module."""
        module = self.model.get_submodule(name)
        if name in self.chosen:
            self._write_layer(name, module, scales)
        else:
            self._write_float(name, module)

    def _write_layer(self, name: str, module: Any, scales: Scales) -> None:
        self._fill_module(module, name)
        self._keep_codes(name, module)
        codes = quantize_data_free(
            name,
            self.chosen,
            self.config,
            self.report,
            # NVFP4 needs the weights of fused layers, whose modules are empty at this time
            lambda fused: self.sources.get(f"{fused}.weight").to(self.device),
        )
        spec = self.chosen[name][1]
        layer = QuantizedLayer(module, codes, spec, **scales.of(name))
        for end, tensor in self.layout.tensors(layer, name).items():
            self.write(f"{self._key(name)}.{end}", tensor)
        self._mark(name, module)
        empty(module)
        self._layers_written += 1
        if self._layers_written % _KEPT == 0:
            return_freed_memory()

    def _write_float(self, name: str, module: Any) -> None:
        """Write the tensors of a float module as stored; children are not included.

        A tied parameter is written once, if its twin stays float. Tensors that are copied from file
        to file and buffers that the checkpoint lacks are left out.
        """
        names = untouched_names(name, module, self.sources, self.chosen, self.config)
        for key in names:
            self.write(self.sources.key_of(key), self.sources.get(key))
            self.sources.mark(key)

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Install hooks in attention, and create the folder for hidden states."""
        undo = install_attention_hooks(self.model, self.chosen)
        try:
            with spilling(self.spill) as self._states_folder:
                yield
        finally:
            undo()

    @contextmanager
    def outside_loaded(self, blocks: Iterable[str], *, heads: bool) -> Iterator[None]:
        """Fill the modules outside of the blocks, and empty them afterwards.

        After an error they stay filled.
        """
        self._fill_outside(blocks, () if heads else self._float_heads())
        yield
        for module in _outside(self.model, blocks).values():
            empty(module, recurse=False)

    def _float_heads(self) -> list[str]:
        """Return the heads that run only after the last block, and have no scales to measure."""
        return [
            name
            for name in heads_of(self.model)
            if name not in self.chosen
            # a head may be the embedding, too
            and not isinstance(self.model.get_submodule(name), torch.nn.Embedding)
        ]

    def record(self, blocks: Mapping[str, Any], samples: list[Any]) -> BlockStream:
        """Return the hidden states at the input of the first block.

        Raises:
            ModelError: the run failed because the checkpoint lacks a parameter.
            NotWalkable: the model does not run its blocks one after the other.
        """
        # recording runs the first block once to learn the form of its output
        self._fill(next(iter(blocks)), {})
        try:
            return BlockStream(
                self.model,
                blocks,
                samples,
                self._states_folder,
                room_for_states(self.device),
            )
        except DataError as error:
            # an empty parameter fails with an error of torch that names no tensor
            lost = self._lost_outside(blocks)
            if lost is None:
                raise
            raise self.sources.missing(f"{lost}: {error}") from error

    def _lost_outside(self, blocks: Iterable[str]) -> str | None:
        """Return a parameter outside of the blocks that the checkpoint lacks, or None."""
        for name, module in _outside(self.model, blocks).items():
            for end in missing_of(module):
                if f"{name}.{end}" not in self.sources:
                    return f"{name}.{end}"
        return None

    def load_whole(self, samples: list[Any], reason: str) -> list[Any]:
        """Load all weights, and return the batches, which come from the caller, on their device.

        Raises:
            ModelError: the checkpoint lacks a parameter, or a weight is NaN or infinite.
        """
        self.report.notes.append(f"all weights were in memory at once: {reason}")
        self._fill_module(self.model, "")
        if missing := missing_of(self.model):
            raise self.sources.missing(missing[0])
        for name, (module, _) in self.chosen.items():
            # NaN in one weight would reach the scales of all later layers
            check_finite(module.weight, name)
        return [moved(sample, self.device) for sample in samples]

    def before_blocks(
        self, scales_before: Mapping[str, Scales], stream: BlockStream
    ) -> None:
        """Open the journal, and write the modules before the blocks, in the order of the model."""
        self.journal.begin(stream.tensors())
        for name, scales in scales_before.items():
            self.hand_over(name, scales)

    def restore_block(
        self, index: int, name: str, layers: Layers, stream: BlockStream
    ) -> bool:
        """Write a block from the journal; return whether the journal has it."""
        stored = self.journal.find(index)
        if stored is None:
            return False
        tensors, entries = stored
        entries.tell(self.report)
        # ``load_block`` would have marked them
        self._mark(name, self.model.get_submodule(name))
        states = self.journal.hidden(index, stream.states)
        stream.states = [state.to(self.device) for state in states]
        self._write_block(name, layers, tensors)
        return True

    def load_block(self, name: str, layers: Layers) -> None:
        """Read the weights of a block."""
        # filling a layer finds codes to keep, which is noted in the report
        self._before = Lengths.of(self.report)
        self._fill(name, layers)

    def store_block(
        self, index: int, name: str, layers: Layers, stream: BlockStream
    ) -> None:
        """Write a block, note it in the journal, and free it."""
        # algorithms on the full model need all blocks, with codes and float weights, in memory
        if finalizers(self.config):
            self._unwritten.append(name)
            return
        tensors = self._named(name, layers)
        entries = StoredBlock.of(layers, self.report, self._before)
        self.journal.keep(index, tensors, entries, stream.states)
        self._write_block(name, layers, tensors)

    def state(self, index: int) -> State:
        """Return the file of an algorithm in the journal's folder."""
        return self.journal.state(index)

    def after_blocks(
        self,
        scales_before: Mapping[str, Scales],
        scales_after: Mapping[str, Scales],
        samples: list[Any],
        progress: bool | None,
    ) -> None:
        """Run the algorithms on the full model and write its blocks, and then the later modules."""
        if finalizers(self.config):
            self._fill_outside(self._unwritten)
            self.run_finalizers(samples, progress)
            for name in self._unwritten:
                layers = layers_in(self.chosen, name)
                self._write_block(name, layers, self._named(name, layers))
        for name, scales in scales_after.items():
            self.hand_over(name, scales)

    def _fill_outside(
        self,
        blocks: Iterable[str],
        without: Collection[str] = (),
    ) -> None:
        """Read the parameters outside of the blocks, except those of given modules.

        Args:
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
            raise self.sources.missing("the embedding of tokens")

    def read_ahead(self, names: Iterable[str], *, recurse: bool = True) -> None:
        """Begin to read the stored tensors of modules."""
        for name in names:
            module = self.model.get_submodule(name)
            # a parameter may be made of several stored tensors (stacked or split experts)
            # codes of another format are decoded, and quantized anew
            tensors = list[StoredTensor]()
            for key, _ in module.named_parameters(recurse=recurse):
                tensors += self.sources.stored_parts(joined(name, key))
            if tensors:
                self.ahead.start(tensors)

    def _fill(self, name: str, layers: Layers) -> None:
        block = self.model.get_submodule(name)
        self._fill_module(block, name)
        self._mark(name, block)
        if missing := missing_of(block):
            raise self.sources.missing(f"{name}.{missing[0]}")
        for layer_name, (module, spec) in layers.items():
            if spec.weight is not None:
                check_finite(module.weight, layer_name)
                self._keep_codes(layer_name, module)

    def _keep_codes(self, name: str, module: Any) -> None:
        """Let a layer keep the checkpoint's codes if the format is as requested.

        The codes are set as ``module.kept_codes``, where ``block.rounded_weight`` finds them.

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

    def _named(self, block_name: str, layers: Layers) -> dict[str, torch.Tensor]:
        """Return the tensors of a quantized block by their names in the output checkpoint.

        The tensors are on the CPU. Float tensors have the dtype of the checkpoint; tensors that are
        copied from file to file are left out.
        """
        named = dict[str, torch.Tensor]()
        block = self.model.get_submodule(block_name)
        for key, tensor in tensors_of(block, self.layout):
            tensor = tensor.cpu()
            name = f"{block_name}.{key}"
            # a name ends with the part of a layer: weight, weight_scale, ...
            owner, _, end = name.rpartition(".")
            if owner in layers:
                named[f"{self._key(owner)}.{end}"] = tensor
                continue
            if self._is_copied(name):
                continue
            if name in self.sources:
                # norms of a bfloat16 checkpoint may be float32 in memory, or the other way round
                tensor = _as_stored(tensor, self.sources.get(name))
            named[self.sources.key_of(name)] = tensor
        return named

    def _write_block(
        self, name: str, layers: Layers, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Write the tensors of a block, and free the block."""
        # sorted, since a journal returns tensors in a different order
        for key in sorted(tensors):
            self.write(key, tensors[key])
        empty(self.model.get_submodule(name))
        # QuantizedLayers have replaced the layers in the block, which still hold float weights
        _drop(self.model, layers)
        return_freed_memory()

    def _is_copied(self, name: str) -> bool:
        """Return whether the stored tensors of a converted parameter are copied."""
        return is_copied(name, self.sources, self.chosen, self.config)

    def _mark(self, name: str, module: Any) -> None:
        mark_written(name, module, self.sources, self.chosen, self.config)


def _format(spec: TensorSpec) -> tuple[Any, ...]:
    """Return the fields of a specification that decide whether codes are compatible."""
    # calibrators and names do not change what codes mean
    return (spec.dtype, spec.symmetric, spec.per_channel, spec.group)


def _as_stored(tensor: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Convert to the dtype of a stored tensor; return ``stored`` if the values are equal."""
    if torch.equal(tensor, stored.to(tensor.dtype)):
        return stored
    return tensor.to(stored.dtype)


def _outside(model: Any, blocks: Iterable[str]) -> dict[str, Any]:
    """Return the modules with parameters outside of the blocks."""
    # parameters of the module itself, not those of children
    modules = {
        name: module for name, module in model.named_modules() if module._parameters
    }
    return outside_of(modules, blocks)


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
