"""Where the parameters of a model lie in its checkpoint: names differ where experts are stacked, or
had other names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from quark_onnx.errors import ModelError
from quark_onnx.torch.checkpoints.converted import Converted
from quark_onnx.torch.checkpoints.safetensors_io import Reader
from quark_onnx.torch.models.checkpoint_names import DiskNames
from quark_onnx.torch.models.experts import ParallelExperts

_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(gate|up|down)_proj\.(\w+)")
#: Makes a tensor of this name of others, which it finds by name.
Change = Callable[[str, Callable[[str], Any]], Any]
#: Bytes; that of torch's own memory.
_ALIGNMENT = 64
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: How checkpoints of Mixtral call the layers of an expert.
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


class Sources:
    """The tensors of a checkpoint by the names of a model's parameters.

    Args:
        reader: the checkpoint.
        model: whose names are asked for; its experts are taken apart.
    """

    def __init__(self, reader: Reader, model: Any) -> None:
        self.reader = reader
        self._model = model
        self._parallel = {
            name
            for name, module in model.named_modules()
            if isinstance(module, ParallelExperts)
        }
        self.used: set[str] = set()
        prefix = str(getattr(model, "base_model_prefix", "") or "")
        self._prefixes = ("", f"{prefix}.") if prefix else ("",)
        self._usual, self._converted = DiskNames(model), Converted(reader, model)
        groups = dict[int, list[str]]()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append(name)
        #: Parameters that are another's, and the name of that.
        self.tied = {
            name: own
            for names in groups.values()
            for name in names
            if name != (own := self._first(names))
        }
        self._twins = dict(self.tied)
        self._changes: list[tuple[Collection[str], Change]] = []

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None or name in self._converted

    def _first(self, names: list[str]) -> str:
        """Return the name that the checkpoint has of a parameter with several names.

        The first without one.
        """
        return next((name for name in names if self._own(name) is not None), names[0])

    def key_of(self, name: str) -> str:
        """How the checkpoint calls a tensor.

        How others of its family do where it has none, or a part of another.
        """
        found = self._own(name)
        return self._usual(name) if found is None or found[1] is not None else found[0]

    def change(self, names: Collection[str], change: Change) -> None:
        """From now on, tensors of these names are made of what they have been so far, and none of
        them is another's.

        Args:
            change: of a name, and of what finds the tensors as they have been.
        """
        self._changes.append((names, change))
        self.tied = {
            name: twin for name, twin in self.tied.items() if name not in names
        }

    def get(self, name: str) -> Any:
        """The tensor of a parameter, as the checkpoint has it, or as it has been changed.

        Raises:
            ModelError: there is none.
        """
        return self._after(name, len(self._changes))

    def _after(self, name: str, changes: int) -> Any:
        """The tensor of a parameter behind so many of the changes."""
        if not changes:
            return self._stored(name)
        names, change = self._changes[changes - 1]

        def before(each: str) -> Any:
            return self._after(each, changes - 1)

        return change(name, before) if name in names else before(name)

    def _stored(self, name: str) -> Any:
        found = self._find(name)
        if found is None and name in self._converted:
            return self._converted.get(
                name,
            )  # a caller that writes it marks it; its keys may be copied instead
        if found is None:
            raise ModelError(
                f"the checkpoint {self.reader.folder} has no tensor for {name!r}",
            )
        key, expert = found
        self._use(key)
        stored = (
            self.reader.get(key) if key in self.reader else self._converted.get(key)
        )
        return stored if expert is None else self._part(stored, name, expert)

    def mark(self, name: str) -> None:
        """Count the tensor of a parameter as asked for."""
        if found := self._find(name):
            self._use(found[0])
        elif name in self._converted:
            self._use(name)

    def _use(self, key: str) -> None:
        """Count a stored tensor, or all that a parameter is converted from, as asked for."""
        self.used.update([key] if key in self.reader else self._converted.keys(key))

    def made_with(self, name: str) -> tuple[str, ...]:
        """Names of all parameters that are converted from the same stored tensors as this one.

        None if it is stored.
        """
        return (
            self._converted.names(name)
            if self._find(name) is None and name in self._converted
            else ()
        )

    def rest(self) -> Iterator[str]:
        """Names of the checkpoint's tensors that no parameter has asked for."""
        return (key for key in self.reader if key not in self.used)

    def _find(self, name: str) -> tuple[str, int | None] | None:
        """The key of a tensor, or of the one that it is tied to."""
        found = self._own(name)
        return (
            self._own(self._twins[name])
            if found is None and name in self._twins
            else found
        )

    def _own(self, name: str) -> tuple[str, int | None] | None:  # noqa: C901, PLR0911
        """The key of a tensor, or the name of a converted stack.

        And which expert of a stack, where it is one.
        """
        if (renamed := self._converted.renamed.get(name)) is not None:
            return renamed, None
        for key in self._spellings(name):
            if key in self.reader:
                return key, None
        if (parallel := self._expert_of(name)) is not None:
            stored = (
                key
                for key in self._spellings(f"{parallel[0]}.weight")
                if key in self.reader
            )
            return next(((key, parallel[1]) for key in stored), None)
        found = _EXPERT.fullmatch(name)
        if found is None or found[4] not in ("weight", "bias"):
            return None
        stack, index, side, kind = found.groups()
        ends = [f"{side}_proj"] if side == "down" else ["gate_up_proj", f"{side}_proj"]
        for end in ends:
            whole = f"{stack}.{end}" + "_bias" * (kind == "bias")
            if whole in self._converted:
                return whole, int(index)
            if whole in self._converted.renamed:
                return self._converted.renamed[whole], int(index)
            for key in self._spellings(whole):
                if key in self.reader:
                    return key, int(index)
        return None

    def _expert_of(self, name: str) -> tuple[str, int] | None:
        """Return the stack that a weight is one expert of, and the expert, where a stack is a
        single weight.
        """
        stack, _, index = name.removesuffix(".weight").rpartition(".")
        if not index.isdigit() or not name.endswith(".weight"):
            return None
        return (stack, int(index)) if stack in self._parallel else None

    def _spellings(self, name: str) -> Iterator[str]:
        names = [name, self._usual(name)]
        if found := _EXPERT.fullmatch(name):
            stack, index, side, kind = found.groups()
            names.append(f"{stack}.{index}.{_MIXTRAL[side]}.{kind}")
        names += [
            each.replace(".mlp.", ".block_sparse_moe.")
            for each in names
            if ".mlp." in each
        ]
        for each in names:
            yield each
            for prefix in filter(None, self._prefixes):
                yield each[len(prefix) :] if each.startswith(prefix) else prefix + each
        # Results have the parts of a layer behind its name, also where the float weight is stored
        # under that name.
        layer, _, part = name.rpartition(".")
        yield f"{self._usual(f'{layer}.weight').removesuffix('.weight')}.{part}"

    def _part(self, stacked: Any, name: str, expert: int) -> Any:
        """One expert's weight or bias of a stack."""
        if self._expert_of(name) is not None:
            return stacked[expert].contiguous()
        stack, _, side, kind = _EXPERT.fullmatch(name).groups()  # type: ignore[union-attr]
        experts = self._model.get_submodule(stack)
        part = stacked[expert]
        if kind == "weight" and experts.turned:
            part = part.t()
        wanted = self._model.get_parameter(name).shape
        if side != "down" and part.shape != wanted:
            part = part[experts.halves(len(part))[side == "up"]]
        return part.contiguous()


def fill(  # noqa: PLR0913
    module: Any,
    prefix: str,
    sources: Sources,
    *,
    dtype: Any = None,
    recurse: bool = True,
    device: Any = None,
) -> None:
    """Read the empty parameters of a module, those of its children included.

    Args:
        prefix: the module's name, empty for the model.
        dtype: what they become; None for what they are in the model, whatever the checkpoint has.
        recurse: whether to read those of its children.
        device: where they go; None for the CPU.

    Raises:
        ModelError: one has another shape, or is no float.
    """
    start = f"{prefix}." if prefix else ""
    for owner_name, owner in module.named_modules() if recurse else [("", module)]:
        place = start + (f"{owner_name}." if owner_name else "")
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.device.type != "meta" or place + name not in sources:
                continue
            value = sources.get(place + name)
            if value.shape != parameter.shape:
                raise ModelError(
                    f"{place + name} is {list(value.shape)}, and"
                    f" {list(parameter.shape)} in the model",
                )
            if parameter.is_floating_point() and value.dtype not in _FLOATS:
                raise ModelError(
                    f"{place + name} is {value.dtype}; start from a checkpoint of float"
                    " weights",
                )
            value = value.to(parameter.dtype if dtype is None else dtype)
            value = _aligned(value) if device is None else value.to(device)
            setattr(owner, name, nn.Parameter(value, requires_grad=False))
        for name, _ in list(owner.named_buffers(recurse=False)):
            if (
                name not in owner._non_persistent_buffers_set
                and place + name in sources
            ):
                setattr(owner, name, sources.get(place + name).to(device))


def move_filled(module: Any, device: Any) -> None:
    """Move the parameters and buffers of a module that are not empty to a device."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.device.type != "meta":
                moved = nn.Parameter(parameter.to(device), requires_grad=False)
                setattr(owner, name, moved)
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.device.type != "meta":
                setattr(owner, name, buffer.to(device))


def _aligned(tensor: Any) -> Any:
    """A tensor where torch would have put it: some processors sum products in another order where
    memory begins anywhere, as in a file, so that a model from a file would not compute what one in
    memory does, to the last bit.
    """
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def tie(model: Any, tied: Mapping[str, str]) -> None:
    """Let parameters be others again, by their names, which filling and emptying modules one by one
    has parted.
    """
    for name, twin in tied.items():
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, model.get_parameter(twin))


def missing_of(module: Any) -> list[str]:
    """Names of parameters that are still empty."""
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.device.type == "meta"
    ]


def empty(module: Any, *, recurse: bool = True) -> None:
    """Give the memory of a module's parameters back, those of its children included if ``recurse``."""  # noqa: E501
    for owner in module.modules() if recurse else [module]:
        for name, parameter in list(owner.named_parameters(recurse=False)):
            hollow = torch.empty_like(parameter, device="meta")
            setattr(owner, name, nn.Parameter(hollow, requires_grad=False))
