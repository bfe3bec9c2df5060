"""Mapping from the parameters of a model to the tensors of its checkpoint.

Names differ if experts are stacked, or if tensors are renamed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quark_onnx.common.containers import grouped
from quark_onnx.common.errors import ModelError
from quark_onnx.torch.checkpoints.converted import Converted
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader
from quark_onnx.torch.models.checkpoint_names import DiskNames
from quark_onnx.torch.models.experts import ParallelExperts
from quark_onnx.torch.models.names import instances, joined, persistent_buffers
from quark_onnx.torch.runtime.safetensors_header import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(gate|up|down)_proj\.(\w+)")
#: Computes the tensor of a name from tensors that a function returns by name.
Change = Callable[[str, Callable[[str], Any]], Any]
#: Bytes; the alignment of torch's own memory.
_ALIGNMENT = 64
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: The same types, as safetensors files name them.
_FLOAT_TYPES = ("F16", "BF16", "F32", "F64")
#: Names of an expert's layers in checkpoints of Mixtral.
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


class Sources:
    """Tensors of a checkpoint by the parameter names of a model.

    Args:
        reader: the checkpoint.
        model: model with unfused experts, whose names are used.
    """

    def __init__(self, reader: CheckpointReader, model: Any) -> None:
        self.reader = reader
        self._model = model
        self._parallel = set(instances(model, ParallelExperts))
        self.used: set[str] = set()
        prefix = getattr(model, "base_model_prefix", "")
        #: With its dot; empty for a model without such a prefix.
        self._prefix = f"{prefix}." if prefix else ""
        self._usual, self._converted = DiskNames(model), Converted(reader, model)
        groups = grouped(
            # Tied parameters are one object under several names.
            (id(parameter), name)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        )
        #: Names of tied parameters, with the name of the stored parameter.
        self.tied = dict[str, str]()
        for names in groups.values():
            present = (name for name in names if self._location(name) is not None)
            # The first name stands for a tensor that the checkpoint lacks.
            stored = next(present, names[0])
            self.tied |= {name: stored for name in names if name != stored}
        # ``change`` takes names out of ``tied``, but their values still come from the twin.
        self._twins = dict(self.tied)
        self._changes: list[tuple[Collection[str], Change]] = []

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None or name in self._converted

    def key_of(self, name: str) -> str:
        """Return the name of a tensor in the checkpoint.

        For a tensor that is missing or part of a stack, return the usual name of the model's
        family.
        """
        location = self._location(name)
        if location is None or location[1] is not None:
            return self._usual(name)
        return location[0]

    def change(self, names: Collection[str], change: Change) -> None:
        """Compute tensors of these names from their previous values on later reads.

        The tensors are no longer tied to other tensors.

        Args:
            names: names of the parameters.
            change: function of a name and of a function that returns previous tensors by name.
        """
        self._changes.append((names, change))
        self.tied = {
            name: twin for name, twin in self.tied.items() if name not in names
        }

    def get(self, name: str) -> torch.Tensor:
        """Return the tensor of a parameter after the registered changes.

        Raises:
            ModelError: the checkpoint has no such tensor.
        """
        # Each change reads the results of the changes before.
        tensor: torch.Tensor = self._after(name, len(self._changes))
        return tensor

    def _after(self, name: str, changes: int) -> Any:
        """Return the tensor of a parameter after the first ``changes`` changes."""
        if not changes:
            return self._stored(name)
        names, change = self._changes[changes - 1]

        def before(previous: str) -> Any:
            return self._after(previous, changes - 1)

        return change(name, before) if name in names else before(name)

    def _stored(self, name: str) -> Any:
        """Return the stored tensor of a parameter, and mark the tensor as used."""
        location = self._find(name)
        if location is None and name in self._converted:
            # The caller marks the tensor as written, unless its keys are copied.
            return self._converted.get(name)
        if location is None:
            raise self.missing(repr(name))
        key, expert = location
        # A stack is used as soon as one of its experts is read.
        self.used.update(self._keys_of_stored(key))
        if key in self.reader:
            stored = self.reader.get(key)
        else:
            stored = self._converted.get(key)
        if expert is None:
            return stored
        return self._part(stored, name, expert)

    def missing(self, name: str) -> ModelError:
        """Return the error for a parameter without a stored tensor."""
        return ModelError(
            f"the checkpoint {self.reader.folder} has no tensor for {name}"
        )

    def check_shape(self, name: str, parameter: nn.Parameter) -> None:
        """Raise ModelError if the file of a float tensor has another shape than its parameter.

        Headers are read, and no values. Parts of stacks, converted tensors and codes have shapes of
        their own, and are checked when they are read.
        """
        key, expert = self._find(name) or ("", None)
        stored = self.reader.tensors.get(key)
        if stored is None or expert is not None or stored.dtype not in _FLOAT_TYPES:
            return
        _check_shape(name, stored.shape, parameter)

    def mark(self, name: str) -> None:
        """Mark the tensor of a parameter as used."""
        self.used.update(self.stored_keys(name))

    def stored_keys(self, name: str) -> Iterable[str]:
        """Return the keys of the tensors from which a parameter is read; none if it is missing."""
        location = self._find(name)
        if location is not None:
            return self._keys_of_stored(location[0])
        return self._converted.keys(name) if name in self._converted else ()

    def _keys_of_stored(self, key: str) -> Iterable[str]:
        """Return the key of a stored tensor, or those of the parts of a converted one."""
        return [key] if key in self.reader else self._converted.keys(key)

    def stored_parts(self, name: str) -> tuple[StoredTensor, ...]:
        """Return the tensors in files from which a parameter is read; none if it is missing."""
        parts = (self.reader.tensors[key].parts for key in self.stored_keys(name))
        return tuple(chain.from_iterable(parts))

    def stored_dtype(self, name: str) -> str:
        """Return the type in which a parameter is read, by its name in safetensors files.

        Decoded and cast tensors have another type than their parts in files.
        """
        key = next(iter(self.stored_keys(name)))
        return self.reader.tensors[key].dtype

    def made_with(self, name: str) -> tuple[str, ...]:
        """Return the names of the parameters converted from the same stored tensors.

        Empty if the parameter itself is stored.
        """
        if self._find(name) is None and name in self._converted:
            return self._converted.names(name)
        return ()

    def rest(self) -> Iterator[str]:
        """Return the names of the checkpoint's unused tensors."""
        return (key for key in self.reader if key not in self.used)

    def _find(self, name: str) -> tuple[str, int | None] | None:
        """Return the key of a tensor, or of the tensor to which it is tied."""
        location = self._location(name)
        # Of tied tensors, files have one.
        if location is None and name in self._twins:
            return self._location(self._twins[name])
        return location

    def _location(self, name: str) -> tuple[str, int | None] | None:
        """Return the key of a tensor or of a converted stack, with the expert's index.

        The index is None for a tensor that is not part of a stack.
        """
        if (renamed := self._converted.renamed.get(name)) is not None:
            return renamed, None
        key = self._stored_key(name)
        if key is not None:
            return key, None
        parallel = self._expert_of(name)
        if parallel is None:
            return self._in_stack(name)
        key = self._stored_key(f"{parallel[0]}.weight")
        return None if key is None else (key, parallel[1])

    def _stored_key(self, name: str) -> str | None:
        """Return the first spelling of a name that the checkpoint has."""
        stored = (key for key in self._spellings(name) if key in self.reader)
        return next(stored, None)

    def _in_stack(self, name: str) -> tuple[str, int] | None:
        """Return the stack with the weight or bias of an expert, and the expert's index."""
        match = _EXPERT.fullmatch(name)
        if match is None or match[4] not in ("weight", "bias"):
            return None
        stack, index, side, kind = match.groups()
        ends = [f"{side}_proj"]
        # Gate and up rows of an expert may be in one stack.
        if side != "down":
            ends.insert(0, "gate_up_proj")
        for end in ends:
            key = self._stack_key(f"{stack}.{end}" + "_bias" * (kind == "bias"))
            if key is not None:
                return key, int(index)
        return None

    def _stack_key(self, name: str) -> str | None:
        """Return the key of a stack that is converted, renamed or stored as it is."""
        if name in self._converted:
            return name
        return self._converted.renamed.get(name) or self._stored_key(name)

    def _expert_of(self, name: str) -> tuple[str, int] | None:
        """Return the stack and the index of an expert in a stack of a single weight."""
        stack, _, index = name.removesuffix(".weight").rpartition(".")
        is_weight = index.isdigit() and name.endswith(".weight")
        if not is_weight or stack not in self._parallel:
            return None
        return (stack, int(index))

    def _spellings(self, name: str) -> Iterator[str]:
        """Yield the possible names of a parameter's tensor in checkpoints."""
        names = [name, self._usual(name)]
        # Mixtral has its own names for the layers of an expert.
        if match := _EXPERT.fullmatch(name):
            stack, index, side, kind = match.groups()
            names.append(f"{stack}.{index}.{_MIXTRAL[side]}.{kind}")
        # Files of Mixtral have this name for the mixture of a block.
        names += [spelling.replace(".mlp.", ".block_sparse_moe.") for spelling in names]
        # names without ".mlp." come twice, of which the second changes nothing
        for spelling in dict.fromkeys(names):
            yield spelling
            shorter = spelling.removeprefix(self._prefix)
            # A base model is stored without the prefix; its tensors also belong to a model with a
            # head.
            yield shorter if shorter != spelling else self._prefix + spelling
        # Quantized checkpoints append parts to the layer's name, even if the float weight is stored
        # under that name.
        layer, _, part = name.rpartition(".")
        yield f"{self._usual(f'{layer}.weight').removesuffix('.weight')}.{part}"

    def _part(self, stacked: Any, name: str, expert: int) -> Any:
        """Return the weight or bias of an expert from a stack."""
        if self._expert_of(name) is not None:
            return stacked[expert].contiguous()
        stack, _, side, kind = _EXPERT.fullmatch(name).groups()  # type: ignore[union-attr]
        experts = self._model.get_submodule(stack)
        tensor = stacked[expert]
        # Stored with inputs first.
        if kind == "weight" and experts.turned:
            tensor = tensor.t()
        wanted = self._model.get_parameter(name).shape
        # A stack of both has twice the rows of the gate or of the up projection.
        if side != "down" and tensor.shape != wanted:
            tensor = tensor[experts.halves(len(tensor))[side == "up"]]
        return tensor.contiguous()


def fill(  # noqa: PLR0913
    module: nn.Module,
    prefix: str,
    sources: Sources,
    *,
    dtype: torch.dtype | None = None,
    recurse: bool = True,
    device: torch.device | str | None = None,
) -> None:
    """Read the empty parameters of a module and of its children.

    Args:
        module: module to fill, in place.
        prefix: name of the module, empty for the model.
        sources: tensors of the checkpoint.
        dtype: dtype of the parameters; None for the dtype in the model.
        recurse: whether to fill the children.
        device: target device; None for the CPU.

    Raises:
        ModelError: a tensor has another shape, or is not a float tensor.
    """
    for owner_name, owner in module.named_modules() if recurse else [("", module)]:
        owner_prefix = joined(prefix, owner_name)
        # A list, since setattr changes the mapping that is iterated.
        for name, parameter in list(owner.named_parameters(recurse=False)):
            key = joined(owner_prefix, name)
            # Filled parameters stay, and parameters that the checkpoint lacks stay empty.
            if parameter.device.type != "meta" or key not in sources:
                continue
            value = sources.get(key)
            _check_value(key, value, parameter)
            value = value.to(parameter.dtype if dtype is None else dtype)
            value = _aligned(value) if device is None else value.to(device)
            setattr(owner, name, nn.Parameter(value, requires_grad=False))
        # Statistics of norms, for instance; computed buffers are not in files.
        for name in persistent_buffers(owner):
            key = joined(owner_prefix, name)
            if key in sources:
                setattr(owner, name, sources.get(key).to(device))


def compute_unsaved(model: PreTrainedModel, stored: Sources) -> None:
    """Compute empty parameters that transformers leaves out of checkpoints.

    Marian's sinusoidal embeddings of positions are such parameters. Their values are fixed. They
    become non-persistent buffers: no later step reads them from a file, or empties them.

    Args:
        model: model of transformers. Parameters with values are unchanged.
        stored: tensors of the checkpoint, which have priority.
    """
    # Sorted, since the entry is a set in some models.
    for name in sorted(getattr(model, "_keys_to_ignore_on_save", None) or ()):
        owner_name, _, parameter_name = name.rpartition(".")
        try:
            owner = model.get_submodule(owner_name)
        except AttributeError:  # the key is one of another model of the family
            continue
        parameter = owner._parameters.get(parameter_name)
        if parameter is None or parameter.device.type != "meta" or name in stored:
            continue
        # A copy, since ``_init_weights`` fills all parameters of a module.
        filled = copy.deepcopy(owner).to_empty(device="cpu")
        with torch.no_grad():
            model._init_weights(filled)
        del owner._parameters[parameter_name]
        owner.register_buffer(
            parameter_name,
            filled.get_parameter(parameter_name).detach(),
            persistent=False,
        )


def _check_value(key: str, value: torch.Tensor, parameter: nn.Parameter) -> None:
    """Raise ModelError for a stored tensor of a wrong shape, or of integer codes."""
    _check_shape(key, value.shape, parameter)
    if parameter.is_floating_point() and value.dtype not in _FLOATS:
        raise ModelError(
            f"{key} is {value.dtype}; start from a checkpoint of float weights",
        )


def move_filled(module: nn.Module, device: torch.device | str) -> None:
    """Move the non-empty parameters and buffers of a module to a device."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.device.type != "meta":
                moved = nn.Parameter(parameter.to(device), requires_grad=False)
                setattr(owner, name, moved)
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.device.type != "meta":
                setattr(owner, name, buffer.to(device))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with torch's own alignment in memory.

    Some processors sum products in another order if memory is not aligned, as in a mapped file.
    Results of a model from a file would differ in the last bits.
    """
    if tensor.data_ptr() % _ALIGNMENT:
        return tensor.clone()
    return tensor


def tie(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Restore shared parameters by name, after separate filling of modules."""
    for name, twin in tied.items():
        owner, _, parameter_name = name.rpartition(".")
        setattr(model.get_submodule(owner), parameter_name, model.get_parameter(twin))


def missing_of(module: nn.Module) -> list[str]:
    """Return the names of the empty parameters."""
    return [
        # ``fill`` leaves empty what the checkpoint lacks.
        name
        for name, parameter in module.named_parameters()
        if parameter.device.type == "meta"
    ]


def fill_whole(
    model: PreTrainedModel, sources: Sources, dtype: torch.dtype | None = None
) -> None:
    """Read all empty parameters of a model, and set it to evaluation.

    Args:
        model: model of transformers, changed in place.
        sources: tensors of the checkpoint.
        dtype: dtype of the parameters; None for the dtype in the model.

    Raises:
        ModelError: a tensor is missing, has another shape, or is not a float tensor.
    """
    fill(model, "", sources, dtype=dtype)
    # Tied parameters were filled one by one, and become one object again.
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    if missing := missing_of(model):
        raise ModelError(
            f"the checkpoint {sources.reader.folder} has no tensor {missing[0]!r}"
            f" ({len(missing)} are missing)"
        )
    model.eval()


def empty(module: nn.Module, *, recurse: bool = True) -> None:
    """Free the memory of a module's parameters, including children if ``recurse``."""
    for owner in module.modules() if recurse else [module]:
        # A list, since setattr changes the mapping that is iterated.
        for name, parameter in list(owner.named_parameters(recurse=False)):
            meta_tensor = torch.empty_like(parameter, device="meta")
            setattr(owner, name, nn.Parameter(meta_tensor, requires_grad=False))


def _check_shape(key: str, shape: Sequence[int], parameter: nn.Parameter) -> None:
    """Raise ModelError if a stored tensor has another shape than its parameter."""
    if tuple(shape) != tuple(parameter.shape):
        raise ModelError(
            f"{key} is {list(shape)}, and {list(parameter.shape)} in the model",
        )
