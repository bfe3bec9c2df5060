"""The folder of a checkpoint: which links are followed, and where outputs may lie.

A checkpoint comes from others. A link in its folder may name any file of the machine, whose content
would become part of the result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quark_onnx.common.errors import ConfigError, ModelError, system_reason

#: Configuration of an adapter (peft), which changes the weights of the base model.
ADAPTER = "adapter_config.json"


def check_free(folder: Path) -> None:
    """Raise ConfigError if a folder is a file, or is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists already and is not empty; name another folder (on the"
            " command line, --overwrite replaces an earlier result)",
        )


def check_links(folder: Path) -> None:
    """Raise ModelError for a link that leaves the folder of a checkpoint.

    Links to blobs of Hugging Face's cache are followed: a snapshot there is a folder of links.
    """
    root = Path(os.path.realpath(folder))
    for link in _links(folder):
        target = Path(os.path.realpath(link))
        if not target.is_relative_to(root) and not _is_blob(target):
            raise ModelError(
                f"{link} is a link to {link.readlink()}, outside of the checkpoint; copy"
                " the file there, or remove the link"
            )
        # copying such a folder would never end
        if Path(os.path.realpath(link.parent)).is_relative_to(target):
            raise ModelError(f"{link} is a link to a folder around it; remove the link")


def _links(folder: Path) -> Iterator[Path]:
    """Yield the links in a folder and in its subfolders, sorted; linked folders are not entered."""
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted([*folders, *files]):
            path = Path(parent, name)
            if path.is_symlink():
                yield path


def _is_blob(path: Path) -> bool:
    """Return whether a path is that of a file in Hugging Face's cache.

    >>> _is_blob(Path("hub/models--org--name/blobs/0123abcd"))
    True
    """
    repository = path.parent.parent.name
    return path.parent.name == "blobs" and repository.startswith("models--")


def leaves(folder: Path, name: str) -> bool:
    """Return whether the file of a name, as a file of the folder has it, is outside of the folder.

    >>> leaves(Path("model"), "../other/model.onnx"), leaves(Path("model"), "model.onnx")
    (True, False)
    """
    path = Path(os.path.realpath(folder / name))
    return not path.is_relative_to(os.path.realpath(folder)) and not _is_blob(path)


def check_apart(output: Path | None, source: Path) -> None:
    """Raise ConfigError if an output lies in the folder of its source."""
    if output is None:
        return
    for parent in Path(os.path.realpath(output)).parents:
        if parent.exists() and source.exists() and parent.samefile(source):
            raise ConfigError(
                f"{output} lies in {source}, the folder of the model that is read; name"
                " a folder outside of it"
            )


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Name the file, and the reason of the system, where writing fails.

    Raises:
        ConfigError: in place of an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {system_reason(error)}"
        ) from error
