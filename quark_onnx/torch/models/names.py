"""Modules of a model by name, and names of their parts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")
#: Entries of lists of layers in which dots alone have a meaning as a regular expression.
_PLAIN = re.compile(r"[\w.-]+")


def joined(owner: str, name: str) -> str:
    """Return the name of a part of a module; either may be empty, for the module itself.

    >>> joined("layers.0", "weight"), joined("", "weight"), joined("layers.0", "")
    ('layers.0.weight', 'weight', 'layers.0')
    """
    return ".".join(part for part in (owner, name) if part)


def persistent_buffers(module: nn.Module) -> dict[str, Any]:
    """Return the buffers of a module itself that belong to its state, by name.

    Buffers of children, and those that no state dict has, are left out.
    """
    return {
        name: buffer
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def configs_of(model: nn.Module) -> list[Any]:
    """Return the configurations of a model's modules, each of them once."""
    # By identity: modules share configurations, and those of transformers are not hashable.
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return list({id(config): config for config in configs}.values())


@contextlib.contextmanager
def replaced_forwards(
    modules: Mapping[str, Any], forwards: Mapping[str, Any]
) -> Iterator[None]:
    """Let modules run other functions in place of their forward methods inside the context.

    Args:
        modules: modules by name.
        forwards: functions of the arguments of the forward method (without ``self``), by name.
    """
    # An instance attribute hides the method of the class; hooks of accelerate set one, too.
    before = {name: vars(module).get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        module.forward = forwards[name]
    try:
        yield
    finally:
        for name, module in modules.items():
            # Without the attribute, the method of the class is found again.
            del module.forward
            if before[name] is not None:  # set by another library
                module.forward = before[name]


@contextlib.contextmanager
def input_hooks(
    modules: Mapping[str, Any], hook_of: Callable[[str], Any]
) -> Iterator[None]:
    """Call hooks before modules run, inside the context.

    Args:
        modules: the modules, by name.
        hook_of: returns the hook of a name, a function of the module, its arguments and its
            keywords.
    """
    handles = list[Any]()
    try:
        for name, module in modules.items():
            hook = hook_of(name)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


class NamesInTransformers:
    """Entries of ``modules_to_not_convert``, as transformers compares them with names of layers.

    ``should_convert_module`` in quantizers/quantizers_utils.py of transformers 5.24 takes an entry
    for a regular expression that matches the layer or a module around it, or for the end of the
    layer's name.

    Args:
        patterns: the entries.

    Raises:
        re.error: an entry is no regular expression, which transformers does not load either.

    >>> entries = NamesInTransformers(["model.layers.1.mlp.gate"])
    >>> entries.match("model.layers.1.mlp.gate"), entries.match("model.layers.1.mlp.gate_proj")
    (True, False)
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        entries = tuple(patterns)
        self._ends = dict[int, set[str]]()
        self._starts = dict[tuple[int, ...], set[str]]()
        for entry in entries:
            self._ends.setdefault(len(entry), set()).add(entry)
            if _PLAIN.fullmatch(entry):
                # a dot stands for any character
                dots = (index for index, char in enumerate(entry) if char == ".")
                self._starts.setdefault((len(entry), *dots), set()).add(entry)
        # behind a dot, in front of one, or at the end of the name
        boundary = r"(?:(?<=\.)|(?=\.|$))"
        self._expressions = [
            re.compile(f"(?:{entry}){boundary}")
            for entry in entries
            if not _PLAIN.fullmatch(entry)
        ]

    def match(self, name: str) -> bool:
        """Return whether an entry names a layer."""
        return (
            self._ends_with_entry(name)
            or self._starts_with_plain(name)
            or any(expression.match(name) for expression in self._expressions)
        )

    def _ends_with_entry(self, name: str) -> bool:
        """Return whether an entry is the end of a name."""
        # a name that is shorter than an entry is not equal to it
        return any(
            name[max(len(name) - length, 0) :] in entries
            for length, entries in self._ends.items()
        )

    def _starts_with_plain(self, name: str) -> bool:
        """Return whether a plain entry matches a name, up to a boundary.

        Entries with dots in equal places are looked up at once: configurations name thousands of
        layers, whose names have few forms.
        """
        for (length, *dots), entries in self._starts.items():
            start = list(name[:length])
            is_bounded = name[length : length + 1] in ("", ".") or start[-1:] == ["."]
            if len(start) < length or not is_bounded:
                continue
            for index in dots:
                start[index] = "."
            if "".join(start) in entries:
                return True
        return False


def is_named_in_transformers(name: str, pattern: str) -> bool:
    """Return whether an entry of ``modules_to_not_convert`` names a layer in transformers.

    >>> is_named_in_transformers("model.layers.1.mlp.fc1", "model.layers.1")
    True
    """
    return NamesInTransformers([pattern]).match(name)


def within(name: str, block: str) -> bool:
    """Return whether a module is a block or a part of the block, by their names.

    >>> within("layers.1.up", "layers.1"), within("layers.10", "layers.1")
    (True, False)
    """
    return name == block or name.startswith(f"{block}.")


def within_any(name: str, blocks: Iterable[str]) -> bool:
    """Return whether a module is a block or belongs to one, for any of some blocks."""
    return any(within(name, block) for block in blocks)


def outside_of(modules: Mapping[str, T], blocks: Iterable[str]) -> dict[str, T]:
    """Return the modules outside of some blocks, by name."""
    # The blocks are read once per module; they may come as an iterator.
    blocks = tuple(blocks)
    return {
        name: module for name, module in modules.items() if not within_any(name, blocks)
    }


def block_around(name: str, blocks: Iterable[str]) -> str:
    """Return the block that a module is or belongs to; empty if there is none.

    Args:
        name: name of the module.
        blocks: names of the blocks, none of them inside of another.
    """
    for block in blocks:
        if within(name, block):
            return block
    return ""


def instances(model: nn.Module, kind: type[T] | tuple[type[T], ...]) -> dict[str, T]:
    """Return the modules of a class, or of one of several, by name.

    Args:
        model: the model; a shared module has its first name only.
        kind: the class, or classes; instances of subclasses count as well.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, kind)
    }
