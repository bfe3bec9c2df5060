"""Checkpoints: folders of safetensors, read and written tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quark_onnx.errors import ConfigError, ModelError
from quark_onnx.torch.tensor_file import TensorFile

#: The files of tensors, and their index.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Bytes of a file of tensors, at most, but for a tensor that is greater by itself.
SHARD = 4 << 30
#: How files of weights end that are no part of a quantized checkpoint.
_WEIGHTS = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth"),
    *(".gguf", ".h5", ".msgpack"),
)


class Reader:
    """The tensors of a checkpoint, memory-mapped: a tensor is read when it is asked for.

    Args:
        folder: with model.safetensors, or files that an index lists.

    Raises:
        ModelError: a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / INDEX
        if index.exists():
            try:
                listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                self._places = {str(name): folder / str(file) for name, file in listed.items()}
            except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
                raise ModelError(f"{index} is damaged: {error!r}") from error
        elif (folder / SINGLE).exists():
            self._places = dict.fromkeys(self._open(folder / SINGLE).keys(), folder / SINGLE)
        else:
            raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}; safetensors are needed")
        for file in set(self._places.values()):
            if not file.exists():
                raise ModelError(f"{index} lists {file.name}, which is not there")
            with self._open(file) as opened:
                held = set(opened.keys())
            if lost := [name for name, place in self._places.items() if place == file and name not in held]:
                raise ModelError(f"{index} lists {lost[0]} in {file.name}, which does not have it")

    @staticmethod
    def _open(file: Path) -> Any:
        try:
            return safe_open(str(file), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged, or no safetensors file: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def file_of(self, name: str) -> Path:
        return self._places[name]

    def get(self, name: str) -> Any:
        """A tensor.

        Raises:
            ModelError: there is none of this name.
        """
        if name not in self._places:
            raise ModelError(f"the checkpoint {self.folder} has no tensor {name!r}")
        file = self._open(self._places[name])
        try:
            with file:
                return file.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self._places[name]} lists {name!r}, but cannot be read: {error}") from error

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header."""
        with self._open(self._places[name]) as file:
            return tuple(file.get_slice(name).get_shape())


class Writer:
    """A checkpoint that grows tensor by tensor in a folder beside its place, and is put there once it is whole.

    Use it as a context manager; an error leaves nothing behind.

    Args:
        folder: where it goes; may exist only if it is empty.
        shard: bytes of a file of tensors, at most.

    Raises:
        ConfigError: the folder holds something, or cannot be written.
    """

    def __init__(self, folder: Path, shard: int = SHARD) -> None:
        self.folder, self._shard = folder, shard
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists already and is not empty; name another folder")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self.staging = folder.parent / f".{folder.name}.partial"
            shutil.rmtree(self.staging, ignore_errors=True)  # of a run that was killed
            self.staging.mkdir()
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error}") from error
        self._files: list[TensorFile] = []
        self._names: list[list[str]] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if kind is None:
                self._close()
        finally:
            for file in self._files[-1:]:
                file.abandon()
            shutil.rmtree(self.staging, ignore_errors=True)

    def add(self, name: str, tensor: Any) -> None:
        """Write a tensor."""
        size = tensor.numel() * tensor.element_size()
        if not self._files or (self._names[-1] and self._files[-1].size + size > self._shard):
            if self._files:
                self._files[-1].close()
            self._files.append(TensorFile(self.staging / f"part-{len(self._files)}"))
            self._names.append([])
        self._files[-1].add(name, tensor)
        self._names[-1].append(name)

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file into the folder."""
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (self.staging / name).write_text(text, encoding="utf-8")

    def copy(self, file: Path) -> None:
        """Copy a file, or a folder, that is no tensor."""
        if file.is_dir():
            others = shutil.ignore_patterns(*(f"*{end}" for end in _WEIGHTS))
            shutil.copytree(file, self.staging / file.name, ignore=others)
        else:
            shutil.copy2(file, self.staging / file.name)

    def _close(self) -> None:
        for file in self._files[-1:]:
            file.close()
        count = len(self._files)
        if count == 1:
            self._files[0].path.replace(self.staging / SINGLE)
        else:
            places = dict[str, str]()
            for index, names in enumerate(self._names):
                name = f"model-{index + 1:05}-of-{count:05}.safetensors"
                self._files[index].path.replace(self.staging / name)
                places |= dict.fromkeys(names, name)
            total = sum(file.size for file in self._files)
            content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            self.write_json(INDEX, content)
        with contextlib.suppress(FileNotFoundError):
            self.folder.rmdir()
        self.staging.replace(self.folder)


def read_json(file: Path) -> Any:
    """A JSON file.

    Raises:
        ModelError: it is not there, or is none.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{file.parent} has no {file.name}") from error
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def other_files(folder: Path) -> list[Path]:
    """What a checkpoint has beside tensors and config.json: tokenizers, templates, code.

    Raises:
        ModelError: one is a link to what is not there.
    """
    found = sorted(
        file
        for file in folder.iterdir()
        if file.name != "config.json" and not file.name.endswith(_WEIGHTS) and not file.name.startswith(".")
    )
    for file in found:
        if not file.exists():
            raise ModelError(f"{file} is a link to {file.readlink()}, which is not there; complete the folder")
    return found
