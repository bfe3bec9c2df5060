"""Parameters that transformers splits or joins from differently named tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader
from quark_onnx.torch.models.experts import stack_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class _Group:
    """Stored tensors that are converted together.

    Attributes:
        target: name of the first resulting parameter.
        converter: weight converter of transformers.
        keys: names of the stored tensors by their pattern.
        names: names of the resulting parameters.
    """

    target: str
    converter: Any
    keys: dict[str, list[str]] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    def convert(
        self, model: PreTrainedModel | SimpleNamespace, tensors: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the parameters by name, computed from the stored tensors by key.

        Raises:
            ModelError: the tensors do not match the configuration of the model.
        """
        # A converter collects the tensors that are added, and belongs to several groups.
        converter = deepcopy(self.converter)
        for pattern, keys in self.keys.items():
            for key in keys:
                converter.add_tensor(self.target, key, pattern, tensors[key])
        try:
            result = converter.convert(self.target, model=model, config=model.config)
        except Exception as error:  # whatever transformers raises
            stored = ", ".join(tensors)
            raise ModelError(
                f"transformers cannot make {self.target} of {stored}:"
                f" {type(error).__name__}: {error}",
            ) from error
        parameters = dict[str, Any]()
        for name, tensor in result.items():
            # Some conversions return a list of one tensor.
            parameters[name] = tensor[0] if isinstance(tensor, list) else tensor
        return parameters


class Converted:
    """Parameters of a model that are computed from stored tensors.

    Examples are chunks of a fused tensor, and joined or permuted tensors. The conversions are
    transformers' own, as in loading a checkpoint. A model to quantize has unfused experts. A stack
    of experts keeps its name in transformers, and is converted if a single tensor stores it.

    Args:
        reader: the checkpoint.
        model: model of transformers with unfused experts. Another kind of model has no conversions.
    """

    def __init__(self, reader: CheckpointReader, model: Any) -> None:
        self._reader = reader
        # Quantization replaces parameters; conversions need the shapes of the float parameters.
        # Tied parameters have to be found under each of their names.
        parameters = dict[str, Any](model.named_parameters(remove_duplicate=False))
        shapes = {
            name: torch.empty(parameter.shape, device="meta")
            for name, parameter in parameters.items()
        }
        self._shapes = SimpleNamespace(
            get_parameter=shapes.__getitem__,
            config=getattr(model, "config", None),
        )
        self._groups = dict[str, _Group]()
        #: Names of stored tensors by the name of their parameter, where both differ.
        self.renamed = dict[str, str]()
        if not hasattr(model, "base_model_prefix"):
            return
        for group in self._matches(model):
            self._groups |= dict.fromkeys(group.names, group)

    def __contains__(self, name: str) -> bool:
        return name in self._groups

    def keys(self, name: str) -> list[str]:
        """Return the names of the stored tensors from which a parameter is computed."""
        return list(chain.from_iterable(self._groups[name].keys.values()))

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names of the parameters computed from the same stored tensors."""
        return self._groups[name].names

    def get(self, name: str) -> torch.Tensor:
        """Read the stored tensors of a parameter and convert them.

        Raises:
            ModelError: a file is damaged, or the tensors do not match the configuration of the
                model.
        """
        tensors = {key: self._reader.get(key) for key in self.keys(name)}
        parameter: torch.Tensor = self._groups[name].convert(self._shapes, tensors)[
            name
        ]
        # Chunks and transposed tensors are views of the stored tensor.
        return parameter.contiguous()

    def _matches(self, model: Any) -> Iterator[_Group]:
        """Match stored names with the conversions of the model's family.

        Names that differ without a conversion are entered into ``renamed``.

        Yields:
            The stored tensors of one conversion, with the names of the resulting parameters.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        owners = {
            pattern: converter
            for converter in converters
            for pattern in converter.source_patterns
        }
        tensors = dict(model.named_parameters(remove_duplicate=False))
        tensors |= model.named_buffers()
        stacks = dict.fromkeys(stack_names(model))
        names = tensors | stacks
        prefix = model.base_model_prefix
        groups = dict[str, _Group]()
        for key in self._reader:
            name, pattern = rename_source_key(key, renamings, converters, prefix, names)
            if pattern is None:
                # scales of quantized layers are among them, which the float model lacks
                if name != key:
                    self.renamed[name] = key
            elif name in stacks and "*" in pattern:
                # one layer of one expert
                renamed, _ = rename_source_key(key, renamings, [], prefix, tensors)
                self.renamed[renamed] = key
            # A stack that is stored under its own name is read as it is.
            elif name in tensors or (name in stacks and name not in self._reader):
                group = groups.setdefault(name, _Group(name, owners[pattern]))
                group.keys.setdefault(pattern, []).append(key)
        for group in groups.values():
            stored = list(chain.from_iterable(group.keys.values()))
            # Converted meta tensors tell the names of the results, and read nothing.
            hollow = {
                key: torch.empty(self._reader.shape(key), device="meta")
                for key in stored
            }
            results = group.convert(self._shapes, hollow)
            group.names = tuple(name for name in results if name in names)
            yield group
