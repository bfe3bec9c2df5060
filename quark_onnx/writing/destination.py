"""Checks of the output path, made before the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from onnx import ModelProto

from calibrators.scratch import followed
from quark_onnx.common.errors import ConfigError
from quark_onnx.files.io import data_file
from quark_onnx.files.overwrites import (
    refuse_overwritten_arguments,
    same_file,
    stored_beside,
)

#: Endings of files of other formats, which tools would open as such.
_OTHER_FORMATS = frozenset(
    {
        ".tflite",
        ".pt",
        ".pth",
        ".pb",
        ".h5",
        ".keras",
        ".xml",
        ".engine",
        ".plan",
        ".trt",
    }
    | {
        ".gguf",
        ".safetensors",
        ".mlmodel",
        ".mlpackage",
        ".npz",
        ".npy",
        ".json",
        ".yaml",
    }
)


def destination(model: object, output: object) -> Path | None:
    """Return the output file, or None.

    Args:
        model: the input model, a path or a model in memory.
        output: the user's argument, of any type; None for no file.

    Raises:
        ConfigError: the path is not a file, cannot be written, or must not be replaced.
    """
    if output is None:
        return None
    # A null character would raise ValueError in the first system call.
    if not isinstance(output, str | Path) or "\0" in str(output):
        raise ConfigError(f"output is {output!r}; it must be a path")
    target = Path(output)
    if target.suffix.lower() in _OTHER_FORMATS:
        raise ConfigError(
            f"output {target} is named like another format; the result is an ONNX model: name it"
            f" {target.with_suffix('.onnx').name}"
        )
    try:
        # A name that is too long, for example, raises OSError here.
        target = followed(target)
        exists = target.exists()
    except OSError as error:
        raise ConfigError(
            f"output {target} is no path that a file can have: {error.strerror}",
        ) from error
    if target.is_dir():
        raise ConfigError(
            f"output {target} is a folder; give the name of the .onnx file to write",
        )
    if exists and not target.is_file():
        raise ConfigError(
            f"output {target} is a device or a pipe, which a file would replace; name a"
            " file",
        )
    if exists and target.suffix.lower() != ".onnx":
        raise ConfigError(
            f"output {target} exists and is not named .onnx; it is not replaced by a"
            " model",
        )
    refuse_overwritten_arguments({"model": model}, {"output": target})
    # Missing folders are created when the model is written, in the nearest existing one.
    parents = list(target.absolute().parents)
    # On Windows none exists where the drive does not.
    folder = next(filter(Path.exists, parents), parents[-1])
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(
            f"output {target} cannot be written: {folder} is no folder that can be"
            " written to",
        )
    return target


def keeps_weights_beside(model: str | Path | ModelProto, target: Path | None) -> bool:
    """Return whether a model has external data, protected from the output.

    Args:
        model: the input model; one in memory has none.
        target: the output file; None for none.

    Raises:
        ConfigError: the output would replace the external data, or a file of another model.
    """
    # Another type is an error of ``load``.
    if not isinstance(model, str | Path):
        return False
    files = stored_beside(Path(model))
    if files and target is not None:
        _require_free(Path(model).parent, sorted(files), target)
    return bool(files)


def _require_free(folder: Path, files: Sequence[str], target: Path) -> None:
    """Check that an output with external data replaces no other file.

    Args:
        files: external data files of the input model, relative to the folder.

    Raises:
        ConfigError: the output would replace the external data, or a file of another model.
    """
    data = data_file(target)
    for name in files:
        held = folder / name
        if same_file(target, held) or same_file(data, held):
            raise ConfigError(
                f"output {target} would replace {name!r}, which holds weights of the"
                " input model",
            )
    if not data.exists():
        return
    # The data file of an earlier output may be replaced; any other file must not.
    is_earlier = target.exists() and data.name in stored_beside(target)
    if not is_earlier:
        raise ConfigError(
            f"output {target} needs {data} for its weights, which exists and is not an"
            " earlier output's",
        )
