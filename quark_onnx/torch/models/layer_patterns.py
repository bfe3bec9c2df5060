"""Patterns of layer names: what a configuration's globs mean in a model.

A glob may name a layer or its parameters, by their names in the model or in checkpoint files, or a
module with layers in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.config.torch_config import (
    DefaultExclude,
    TorchConfig,
    matching,
    no_such_layer,
)
from quark_onnx.torch.models.checkpoint_names import DiskNames
from quark_onnx.torch.models.heads import heads_of
from quark_onnx.torch.models.names import within_any

if TYPE_CHECKING:
    from torch import nn

#: A default exclusion of this name stands for the heads of the model, whatever their names.
_HEAD = "lm_head"


class LayerPatterns:
    """Names of the parts of a model that globs may match.

    Args:
        model: model with unfused experts.
        layers: names of the quantizable layers.
        stored: names of the tensors in the model's files. Files may have parts that the model
            lacks, such as layers for multi-token prediction (MTP).
    """

    def __init__(
        self, model: nn.Module, layers: Collection[str], stored: Iterable[str] = ()
    ) -> None:
        self._model = model
        self._layers = list(layers)
        self._stored = tuple(stored)

    def layers_of(self, glob: str) -> list[str]:
        """Return the names of the layers that a glob means; empty for other parts of the model.

        The first of these that match decide: names of layers; names of their weights, and names in
        files; names of modules, which mean the layers in them.
        """
        by_name = matching(self._layers, glob)
        if by_name:
            return by_name
        by_other_names = [
            layer
            for layer, names in self._other_names.items()
            if any(fnmatchcase(name, glob) for name in names)
        ]
        if by_other_names:
            return by_other_names
        modules = [name for name in matching(self._modules, glob) if name]
        return [layer for layer in self._layers if within_any(layer, modules)]

    def others_of(self, glob: str) -> list[str]:
        """Return the names of modules, parameters and stored tensors that a glob matches."""
        return matching(self.others, glob)

    @cached_property
    def others(self) -> tuple[str, ...]:
        """Names of modules, of parameters and of tensors in files."""
        parameters = [
            name for name, _ in self._model.named_parameters(remove_duplicate=False)
        ]
        in_files = [*(self._file_names(name) for name in parameters), *self._stored]
        names = [*self._modules, *parameters, *in_files]
        for name in in_files:
            parts = name.split(".")
            # the modules around a tensor, the innermost first
            names += [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
        return tuple(name for name in dict.fromkeys(names) if name)

    @cached_property
    def _modules(self) -> tuple[str, ...]:
        return tuple(
            name for name, _ in self._model.named_modules(remove_duplicate=False)
        )

    @cached_property
    def _file_names(self) -> DiskNames:
        return DiskNames(self._model)

    @cached_property
    def _other_names(self) -> dict[str, tuple[str, ...]]:
        """Names of layers in files and names of their weights, by the layer's name."""
        names = dict[str, tuple[str, ...]]()
        for layer in self._layers:
            in_files = self._file_names(f"{layer}.weight")
            layer_in_files = in_files.removesuffix(".weight")
            names[layer] = (f"{layer}.weight", in_files, layer_in_files)
        return names


def with_layer_names(
    config: TorchConfig, patterns: LayerPatterns, model: nn.Module
) -> TorchConfig:
    """Return a configuration whose globs match names of layers, with the same meaning.

    Exclusions of parts that are no layers are left out, as such parts stay float anyway. The
    default exclusion of ``lm_head`` means all heads of the model. Layers that ``layers`` asks for
    are taken out of default exclusions.

    Args:
        config: the configuration of a user.
        patterns: the names of the model's parts.
        model: the model.

    Raises:
        ConfigError: a glob matches nothing, or a glob of ``layers`` means a part that cannot be
            quantized.
    """
    layers = list[tuple[str, LayerSpec]]()
    for glob, spec in config.layers:
        names = patterns.layers_of(glob)
        if not names:
            raise _not_a_layer("layers", glob, patterns)
        # the glob itself, where it matches names of layers: configurations are written with it
        globs = [glob] if matching(names, glob) else names
        layers += [(layer_glob, spec) for layer_glob in globs]
    exclude = list[str]()
    for glob in config.exclude:
        names = patterns.layers_of(glob)
        if isinstance(glob, DefaultExclude):
            exclude += _default_floats(glob, config, patterns, model)
        elif matching(names, glob):
            exclude.append(glob)
        elif names or patterns.others_of(glob):
            exclude += names
        else:
            raise no_such_layer("exclude", glob, patterns.others)
    return config.with_(layers=tuple(layers), exclude=tuple(exclude))


def _not_a_layer(where: str, glob: str, patterns: LayerPatterns) -> ConfigError:
    """Return the error for a glob of a specification that means no layer."""
    others = patterns.others_of(glob)
    if not others:
        return no_such_layer(where, glob, patterns.others)
    return ConfigError(
        f"{where} names {glob!r}, but {others[0]} is no layer that can be quantized; it"
        " stays float, so leave it out"
    )


def _default_floats(
    glob: DefaultExclude, config: TorchConfig, patterns: LayerPatterns, model: nn.Module
) -> list[str]:
    """Return globs of the layers of a default exclusion, without those that are asked for."""
    floats = set(patterns.layers_of(glob))
    heads = set(heads_of(model)) if fnmatchcase(_HEAD, glob) else set()
    asked = asked_for(config, patterns, floats | heads)
    # one glob instead of many names, wherever it can stay
    if floats.isdisjoint(asked):
        return [glob, *sorted(heads - asked - floats)]
    return sorted((floats | heads) - asked)


def asked_for(
    config: TorchConfig, patterns: LayerPatterns, usually_float: Collection[str]
) -> set[str]:
    """Return the layers that usually stay float, and that a glob of ``layers`` means alone.

    A broad glob such as "*" also matches other layers, and does not ask for them.
    """
    asked = set[str]()
    for glob in config.named:
        names = patterns.layers_of(glob)
        if set(names) <= set(usually_float):
            asked.update(names)
    return asked
