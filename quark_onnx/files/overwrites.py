"""Outputs replace no input and no other output; checked before anything runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from calibrators.readers.datasets import DATASET_SUFFIXES
from calibrators.readers.files import ARRAY_SUFFIXES
from calibrators.readers.images import IMAGE_SUFFIXES
from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.files.io import data_file, external_files, read_stored
from quark_onnx.files.model_file import mentions

#: Files of a folder of samples that are read.
SAMPLE_SUFFIXES = ARRAY_SUFFIXES | IMAGE_SUFFIXES | DATASET_SUFFIXES


@dataclass(frozen=True)
class Input:
    """A file or folder that is read.

    Attributes:
        name: argument or option, for messages.
        path: the path; an input that does not exist is checked where it is read.
        suffixes: endings of the files that are read in a folder; None for every file.
    """

    name: str
    path: Path
    suffixes: frozenset[str] | None = None


@dataclass(frozen=True)
class Output:
    """A file or folder that is written.

    Attributes:
        name: argument or option, for messages.
        path: the path.
        replaced: True for a folder that is replaced with all that it holds.
        files: names of the files that a folder receives, whose other files stay.
    """

    name: str
    path: Path
    replaced: bool = False
    files: tuple[str, ...] = ()

    @property
    def written(self) -> list[Path]:
        """Return the paths that are written."""
        if self.replaced:
            return [self.path]
        if self.files:
            return [self.path / name for name in self.files]
        if self.path.suffix.lower() == ".onnx":
            return [self.path, data_file(self.path)]
        return [self.path]

    def __str__(self) -> str:
        return f"{self.name} {self.path}"


def refuse_overwrites(inputs: Sequence[Input], outputs: Sequence[Output]) -> None:
    """Check that no output is an input, lies in one or holds one, or is another output.

    Links are followed. Names of a file are equal if the file system says so: hard links, and
    other cases of letters where it ignores case.

    Args:
        inputs: what is read.
        outputs: what is written.

    Raises:
        ConfigError: names the two.
    """
    present = [read for read in inputs if _exists(read.path)]
    for output in outputs:
        for file in output.written:
            # A device or a pipe is written to, and not replaced.
            if not _is_device(file):
                for read in present:
                    _refuse_input(output, file, read)
    for first, second in combinations(outputs, 2):
        _refuse_output(first, second)


def refuse_overwritten_arguments(
    inputs: Mapping[str, object], outputs: Mapping[str, object]
) -> None:
    """Check the arguments of a call with ``refuse_overwrites``.

    Args:
        inputs: arguments that may be paths, by name; other values are ignored. A folder is one of
            samples.
        outputs: likewise, paths of files; "folder" is replaced, and "resume" receives .npz files.

    Raises:
        ConfigError: names the two arguments.
    """
    refuse_overwrites(
        [
            Input(name, Path(value), SAMPLE_SUFFIXES)
            for name, value in inputs.items()
            if isinstance(value, str | Path) and _is_path(value)
        ],
        [
            Output(
                name,
                Path(value),
                replaced=name == "folder",
                files=("*.npz",) if name == "resume" else (),
            )
            for name, value in outputs.items()
            if isinstance(value, str | Path) and _is_path(value)
        ],
    )


def same_file(first: Path, second: Path) -> bool:
    """Return whether two paths lead to one file, which may not exist yet."""
    with suppress(OSError, ValueError):
        # Hard links have different paths, and samefile compares the files themselves.
        return first.samefile(second)
    first, second = resolved(first), resolved(second)
    if first == second:
        return True
    # Files that do not exist: equal but for the case, in a folder that ignores case.
    alike = str(first).casefold() == str(second).casefold()
    return alike and not _exists(first) and not _exists(second) and ignores_case(first)


def resolved(path: Path) -> Path:
    """Return a path with links followed, as far as possible."""
    # realpath leaves a circular link as it is; resolve() raises.
    return Path(os.path.realpath(path))


def stored_beside(model: Path) -> set[str]:
    """Return the external data files of a model; empty for other files."""
    try:
        # The search for the key of external data avoids parsing the weights of a large model.
        if mentions(model, b"location"):
            return external_files(read_stored(model))
        return set()
    except ModelError:
        return set()


def _refuse_input(output: Output, file: Path, read: Input) -> None:
    """Raise ConfigError if a file of an output is an input, lies in one, or holds one."""
    if same_file(file, read.path):
        raise ConfigError(
            f"{output} is the input {read.name} itself ({read.path}); inputs are never"
            " overwritten: name another file",
        )
    if output.replaced and _contains(output.path, read.path):
        raise ConfigError(
            f"{output} is replaced with all that it holds, such as {read.name}"
            f" {read.path}; name another folder",
        )
    if read.path.is_dir() and _is_read(read, file):
        raise ConfigError(
            f"{output} would change the files of {read.name} {read.path}, which are read;"
            " write it to another folder",
        )
    # Parsed only where a file would be replaced.
    if read.path.is_file() and _exists(file):
        for name in sorted(stored_beside(read.path)):
            if same_file(file, read.path.parent / name):
                raise ConfigError(
                    f"{output} would replace {name!r}, which holds weights of the input"
                    f" {read.name} {read.path}",
                )


def _refuse_output(first: Output, second: Output) -> None:
    """Raise ConfigError if two outputs have a file in common."""
    for first_file in first.written:
        for second_file in second.written:
            if _is_device(first_file) or not same_file(first_file, second_file):
                continue
            both = f"{first.name} and {second.name} are"
            if first.name == second.name:
                both = f"both paths of {first.name} are"
            raise ConfigError(f"{both} the same file, {first_file}; name two files")
    for inner, outer in ((first, second), (second, first)):
        inside = any(_contains(outer.path, file) for file in inner.written)
        if outer.replaced and inside:
            raise ConfigError(
                f"{inner} lies in {outer}, which is replaced with all that it holds; name"
                " another folder",
            )


def _is_read(folder: Input, file: Path) -> bool:
    """Return whether a file is one of those that are read in a folder, or would become one."""
    suffixes = folder.suffixes
    is_sample = suffixes is None or file.suffix.lower() in suffixes
    if is_sample and _contains(folder.path, file):
        return True
    # Links lead from files of the folder to files elsewhere, as in the cache of a model hub.
    return _exists(file) and any(
        same_file(member, file)
        for member in _members(folder.path)
        if suffixes is None or member.suffix.lower() in suffixes
    )


def _members(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def _contains(folder: Path, path: Path) -> bool:
    return any(same_file(parent, folder) for parent in resolved(path).parents)


def _exists(path: Path) -> bool:
    # Names that are too long, or hold a null character.
    with suppress(OSError, ValueError):
        return path.exists()
    return False


def _is_device(path: Path) -> bool:
    return _exists(path) and not path.is_file() and not path.is_dir()


def ignores_case(path: Path) -> bool:
    """Return whether the file system of a path ignores case."""
    for parent in path.parents:
        swapped = parent.with_name(parent.name.swapcase()) if parent.name else parent
        if swapped != parent and parent.exists():
            return swapped.exists() and swapped.samefile(parent)
    return False


def _is_path(value: str | Path) -> bool:
    return bool(str(value)) and "\0" not in str(value)
