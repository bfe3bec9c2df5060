"""Reading and writing of folders of safetensors, tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrators import json_file
from calibrators.limits import TEXT
from calibrators.scratch import ScratchFolder
from quark_onnx.common.errors import ModelError
from quark_onnx.torch.checkpoints.pickled import pickled_heads
from quark_onnx.torch.checkpoints.safetensors_writer import TYPES, TensorFile
from quark_onnx.torch.runtime.checkpoint_folder import (
    ADAPTER,
    check_free,
    check_links,
    write_errors,
)
from quark_onnx.torch.runtime.safetensors_header import StoredTensor, read_header

if TYPE_CHECKING:
    import torch

#: The files of tensors, and their index.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: The same of torch's own format.
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
#: The tensors of an adapter, which are no part of the model's.
ADAPTER_TENSORS = "adapter_model.safetensors"
#: Upper bound of a tensor file's size in bytes; a larger tensor gets its own file.
SHARD = 4 << 30
#: Endings of weight files, which are no part of a quantized checkpoint.
_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
)


class CheckpointReader:
    """Tensors of a checkpoint.

    The constructor reads the file headers. A tensor is read on request.

    Args:
        folder: folder with model.safetensors, with the files of an index, or with other safetensors
            files; or a single file. A folder without safetensors may have pytorch_model.bin, or the
            files of its index, which are read with torch's ``weights_only``.
        adapter: whether the caller applies the adapter (peft) in the folder to the tensors.

    Attributes:
        folder: the folder or file.
        tensors: stored tensors by name.
        notes: notes for the user on tensors that are converted on reading.

    Raises:
        ModelError: a file is missing or damaged, a link leaves the folder, or an adapter lies
            beside the tensors.
    """

    def __init__(self, folder: Path, *, adapter: bool = False) -> None:
        self.folder = folder
        self.notes: list[str] = []
        if folder.is_file():
            self.tensors = _heads(folder)
            return
        check_links(folder)
        if not adapter:
            check_no_adapter(folder)
        self.tensors = _tensors_in(folder)
        if self.tensors:
            return
        self.tensors = pickled_tensors(folder)
        if not self.tensors:
            raise ModelError(
                f"{folder} holds no *.safetensors; save the model there with"
                " save_pretrained",
            )
        self.notes.append(
            f"the weights of {folder} are pickled (.bin); they are read as tensors alone,"
            " and converted to safetensors"
        )

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def file_of(self, name: str) -> Path:
        """Return the file of a tensor."""
        return self.tensors[name].path

    def get(self, name: str) -> torch.Tensor:
        """Read a tensor.

        Raises:
            ModelError: the checkpoint has no tensor of this name.
        """
        if name not in self.tensors:
            raise ModelError(f"the checkpoint {self.folder} has no tensor {name!r}")
        return self.tensors[name].read()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the header."""
        return self.tensors[name].shape


def tensor_files(reader: CheckpointReader) -> set[Path]:
    """Return the files of a checkpoint; many tensors share a file."""
    return {tensor.path for tensor in reader.tensors.values()}


def size_of_files(reader: CheckpointReader) -> int:
    """Return the size of all tensor files of a checkpoint in bytes."""
    return sum(file.stat().st_size for file in tensor_files(reader))


def check_no_adapter(folder: Path) -> None:
    """Raise ModelError if a checkpoint has an adapter, whose weights would be lost."""
    if (folder / ADAPTER).is_file():
        raise ModelError(
            f"{folder} has an adapter ({ADAPTER}), which belongs to the weights; merge"
            " first: 'quark-onnx llm ptq --merge-adapter' does for LoRA, as does peft's"
            " merge_and_unload() before save_pretrained. Or remove the adapter's files"
        )


def _tensors_in(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder's safetensors files; empty without such files."""
    # With an index, other files in the folder do not belong to the checkpoint.
    if (folder / INDEX).is_file():
        return _listed(folder)
    if (folder / SINGLE).is_file():
        return _heads(folder / SINGLE)
    # Sorted, since the order of a folder depends on the file system.
    tensors = dict[str, StoredTensor]()
    for file in sorted(folder.glob("*.safetensors")):
        if file.name != ADAPTER_TENSORS:
            tensors |= _heads(file)
    return tensors


def pickled_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of pytorch_model.bin, or of the files of its index; empty without both.

    Raises:
        ModelError: a file is damaged, or holds other objects than tensors.
    """
    if (folder / PICKLED_INDEX).is_file():
        return _listed(folder, PICKLED_INDEX, pickled_heads)
    if (folder / PICKLED).is_file():
        return pickled_heads(folder / PICKLED)
    return {}


def _listed(
    folder: Path,
    index_name: str = INDEX,
    heads: Callable[[Path], Mapping[str, StoredTensor]] | None = None,
) -> dict[str, StoredTensor]:
    """Return the tensors of the files that an index lists.

    For a tensor in several files, the file of its entry has priority.

    Args:
        heads: function that returns the tensors of a file; None for safetensors files.
    """
    index = folder / index_name
    listed = read_json(index).get("weight_map")
    # An empty map has no types, and is refused, too.
    if not isinstance(listed, dict) or {type(file) for file in listed.values()} != {
        str
    }:
        raise ModelError(f"{index} has no weight_map of tensors to files")
    files = dict[str, Mapping[str, StoredTensor]]()
    for file in sorted(set(listed.values())):
        _check_listed(folder, file, index_name)
        files[file] = (heads or _heads)(folder / file)
    if lost := sorted(name for name, file in listed.items() if name not in files[file]):
        raise ModelError(
            f"{folder / listed[lost[0]]} lacks the tensor {lost[0]!r}, which"
            f" {index_name} lists there",
        )
    # Tensors that the index leaves out are readable.
    tensors = dict[str, StoredTensor]()
    for heads_of_file in files.values():
        tensors |= heads_of_file
    return tensors | {name: files[file][name] for name, file in listed.items()}


def _check_listed(folder: Path, file: str, index_name: str) -> None:
    """Raise ModelError if a file of an index is elsewhere, or missing."""
    # A path such as ../other would lead out of the folder.
    if Path(file).name != file:
        raise ModelError(
            f"{folder / index_name} lists {file!r}, which is no name of a file in its folder",
        )
    if not (folder / file).is_file():
        raise ModelError(
            f"{folder / file} is missing; {index_name} lists it: complete the download",
        )


def _heads(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, from its header.

    Raises:
        ModelError: the file is damaged, or no safetensors file.
    """
    try:
        return read_header(path).tensors
    except (OSError, ModelError) as error:
        raise ModelError(
            f"{path} is damaged, or no safetensors file: {error}; download it again",
        ) from error


class Writer:
    """Checkpoint that is written tensor by tensor into a temporary folder.

    The folder gets its final name when it is complete. Use the writer as a context manager; an
    error removes the temporary folder.

    Args:
        folder: target folder; may exist if it is empty.
        shard: upper bound of a file's size in bytes.

    Raises:
        ConfigError: the folder is not empty, or cannot be written.
    """

    def __init__(self, folder: Path, shard: int = SHARD) -> None:
        self.folder, self._shard = folder, shard
        check_free(folder)
        with write_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            # In the same parent, so that the final renaming stays on one file system. Each run has
            # its own: two runs with one target must not write into each other's files.
            self._scratch = ScratchFolder(folder.parent, f"{folder.name}.partial")
            self.staging = self._scratch.path / folder.name
            self.staging.mkdir()
        self._files: list[TensorFile] = []
        self._names: list[list[str]] = []
        #: The written tensors by name.
        self.written = dict[str, StoredTensor]()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if kind is None:
                with write_errors(self.folder):
                    self._close()
        finally:
            # ``add`` has closed the earlier files.
            for file in self._files[-1:]:
                file.abandon()
            self._scratch.close()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor.

        Raises:
            ModelError: a tensor of this name is written already.
            ConfigError: the system does not write it, for instance to a full disk.
        """
        if name in self.written:
            raise ModelError(f"{self.folder} would have two tensors of the name {name}")
        size = tensor.numel() * tensor.element_size()
        with write_errors(self.folder):
            # A tensor that is larger than a shard has a file of its own.
            if not self._files or (
                self._names[-1] and self._files[-1].size + size > self._shard
            ):
                if self._files:
                    self._files[-1].close()
                file = TensorFile(self.staging / f"part-{len(self._files)}")
                self._files.append(file)
                self._names.append([])
            self._files[-1].add(name, tensor)
        self.written[name] = StoredTensor(
            name, tuple(tensor.shape), TYPES[tensor.dtype], self._files[-1].path
        )
        self._names[-1].append(name)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file into the folder."""
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        with write_errors(self.folder):
            (self.staging / name).write_text(text, encoding="utf-8")

    def copy(self, file: Path) -> None:
        """Copy a file or a folder without tensors."""
        others = shutil.ignore_patterns(*(f"*{end}" for end in _WEIGHTS))
        with write_errors(self.folder):
            if file.is_dir():
                shutil.copytree(file, self.staging / file.name, ignore=others)
            else:
                shutil.copy2(file, self.staging / file.name)

    def _close(self) -> None:
        """Give the files and then the folder their final names."""
        for file in self._files[-1:]:
            file.close()
        # Names of several files have their number, which is known now.
        if len(self._files) == 1:
            self._files[0].path.replace(self.staging / SINGLE)
        else:
            self._number_files()
        # Windows cannot replace a folder, even an empty one.
        with contextlib.suppress(FileNotFoundError):
            self.folder.rmdir()
        self.staging.replace(self.folder)

    def _number_files(self) -> None:
        """Rename several files as transformers expects, and write the index."""
        count = len(self._files)
        files_by_tensor = dict[str, str]()
        for number, (file, names) in enumerate(
            zip(self._files, self._names, strict=True), 1
        ):
            name = f"model-{number:05}-of-{count:05}.safetensors"
            file.path.replace(self.staging / name)
            files_by_tensor |= dict.fromkeys(names, name)
        total = sum(file.size for file in self._files)
        content = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(files_by_tensor.items())),
        }
        self.write_json(INDEX, content)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ModelError: the file is missing, damaged, or holds no object.
    """
    if not file.exists():
        raise ModelError(f"{file.parent} has no {file.name}")
    document = json_file.read_json(file, "the file", ModelError, most=TEXT)
    if not isinstance(document.value, dict):
        raise document.wrong("an object")
    return document.value


def _is_copied(file: Path) -> bool:
    """Return whether a quantized checkpoint has a file of its source unchanged."""
    # The tensors of an adapter are merged into the model's.
    if file.name in ("config.json", ADAPTER) or file.name.startswith("."):
        return False
    return not file.name.endswith(_WEIGHTS)


def other_files(folder: Path) -> list[Path]:
    """Return a checkpoint's further files: tokenizers, templates, code.

    Tensors and config.json are left out.

    Raises:
        ModelError: a file is a broken link.
    """
    files = sorted(file for file in folder.iterdir() if _is_copied(file))
    # The cache of Hugging Face has links to files that a download may lack.
    for file in files:
        if not file.exists():
            raise ModelError(
                f"{file} is a link to {file.readlink()}, which is not there; complete"
                " the folder",
            )
    return files
