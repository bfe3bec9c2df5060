"""A Hugging Face folder: JSON files with clear errors, and tensors that are read one at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quark_onnx.errors import ModelError

_INDEX = "model.safetensors.index.json"
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class Stored:
    """A tensor that lies in a file.

    Attributes:
        name: what the checkpoint calls it.
        shape: its lengths.
        path: the file.
    """

    name: str
    shape: tuple[int, ...]
    path: Path

    def read(self) -> Any:
        """The tensor, in the type that it is stored in.

        Raises:
            ModelError: the file does not give it.
        """
        try:
            with safe_open(self.path, framework="pt") as file:
                return file.get_tensor(self.name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self.path}: the tensor {self.name!r} cannot be read: {error}") from error


def tensors_in(folder: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint by name; nothing but the heads of its files is read.

    Raises:
        ModelError: there are no safetensors files, one is missing or damaged, or a tensor holds no floats.
    """
    found: dict[str, Stored] = {}
    index = folder / _INDEX
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise ModelError(f"{index} has no weight_map of tensors to files")
        for shard in sorted(set(shards.values())):
            if Path(shard).name != shard or not (folder / shard).is_file():
                raise ModelError(f"{folder / shard} is missing; {_INDEX} names it: complete the download")
            found |= _heads(folder / shard)
        if missing := sorted(shards.keys() - found.keys()):
            raise ModelError(f"{folder / shards[missing[0]]} lacks the tensor {missing[0]!r}, which {_INDEX} names")
        return found
    whole = folder / "model.safetensors"
    for path in [whole] if whole.is_file() else sorted(folder.glob("*.safetensors")):
        found |= _heads(path)
    if not found:
        raise ModelError(f"{folder} holds no *.safetensors; save the model there with save_pretrained")
    return found


def _heads(path: Path) -> dict[str, Stored]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - the file is no mapping
            heads = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is damaged or no safetensors file: {error}; download it again") from error
    for name, (_, dtype) in heads.items():
        if dtype not in _FLOATS:
            raise ModelError(f"{path}: the tensor {name!r} is of type {dtype}; the floats of the model are needed")
    return {name: Stored(name, shape, path) for name, (shape, _) in heads.items()}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: the file is missing, or it is none.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}; an object is needed")
    return value


def read_config(folder: Path) -> Any:
    """The configuration of a model, with the defaults of its class filled in by transformers.

    Raises:
        ModelError: config.json is missing or damaged, or describes a model that is quantized already.
    """
    from transformers import AutoConfig

    path = folder / "config.json"
    values = read_json(path)
    if method := (values.get("quantization_config") or {}).get("quant_method"):
        raise ModelError(f"{path} is that of a model quantized already ({method}); give the folder of the float model")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # it checks values in many ways; whatever it says, the file is the reason
        raise ModelError(f"{path} is not understood: {error}") from error
