"""Converted: parameters that transformers splits or joins from differently named tensors of a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

from quark_onnx.errors import ModelError
from quark_onnx.torch.checkpoint import Reader


class Converted:
    """The parameters of a model that are made of other tensors: chunks of a fused one, or several joined.

    Stacks of experts are not among them: a pattern with a glob stands for these, and models are quantized with their
    experts taken apart.

    Args:
        reader: the checkpoint.
        model: of transformers; other models convert nothing.
    """

    def __init__(self, reader: Reader, model: Any) -> None:
        self._reader, self._model = reader, model
        self._converters = dict[str, Any]()
        #: By name: that of the parameter with the first target's name, which operations expect.
        self._first = dict[str, str]()
        # Quantizing replaces parameters; operations ask for the shapes of the float ones.
        self._parameters = dict[str, Any](model.named_parameters(remove_duplicate=False))
        self._keys: dict[str, dict[str, str]] = defaultdict(dict)
        if hasattr(model, "base_model_prefix"):
            self._find()

    def __contains__(self, name: str) -> bool:
        return name in self._converters

    def keys(self, name: str) -> list[str]:
        """Return the names of the stored tensors that a parameter is made of."""
        return list(self._keys[name].values())

    def get(self, name: str) -> Any:
        """Read the stored tensors and convert them.

        Raises:
            ModelError: a file is damaged, or the tensors do not suit the configuration of the model.
        """
        converter, keys = deepcopy(self._converters[name]), self._keys[name]
        tensors: Any = {each: [self._reader.get(keys[each])] for each in converter.source_patterns if each in keys}
        try:
            for operation in converter.operations:
                tensors = operation.convert(
                    tensors,
                    source_patterns=converter.source_patterns,
                    target_patterns=converter.target_patterns,
                    full_layer_name=self._first[name],
                    model=SimpleNamespace(get_parameter=self._parameters.__getitem__, config=self._model.config),
                    config=self._model.config,
                )
        except Exception as error:  # whatever transformers raises
            stored = ", ".join(keys.values())
            raise ModelError(f"transformers cannot make {name} of {stored}: {type(error).__name__}: {error}") from error
        found = next(value for target, value in tensors.items() if target in name)
        return (found[0] if isinstance(found, list) else found).contiguous()

    def _find(self) -> None:
        """Match the stored names with the converters of the model's family, as transformers does when it loads."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        mapping = get_model_conversion_mapping(self._model)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter) and _is_plain(each)]
        owners = {pattern: each for each in converters for pattern in each.source_patterns}
        if not converters:
            return
        names = self._parameters
        prefix = self._model.base_model_prefix
        for key in self._reader:
            first, pattern = rename_source_key(key, renamings, converters, prefix, names)
            if pattern is None or first not in names:
                continue
            converter = owners[pattern]
            start = converter.target_patterns[0]
            for target in converter.target_patterns:
                name = first.replace(start, target, 1)
                if name in names:
                    self._converters[name], self._first[name] = converter, first
                    self._keys[name][pattern] = key


def _is_plain(converter: Any) -> bool:
    """Return whether both sides name tensors: no glob for experts, and no group that a target takes over."""
    targets = converter.target_patterns
    return not any("*" in each for each in (*converter.source_patterns, *targets)) and "\\" not in "".join(targets)
