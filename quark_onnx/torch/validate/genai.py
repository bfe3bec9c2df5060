"""Checks of a folder for onnxruntime-genai: the configuration and the named files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import uses_external_data

from quark_onnx.common.errors import ModelError
from quark_onnx.files.model_file import MALFORMED
from quark_onnx.torch.runtime.checkpoint_folder import leaves
from quark_onnx.torch.validate.checkpoint import NO_FILE, read_json
from quark_onnx.torch.validate.fields import object_of, strings_of
from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.rules import broken

CONFIG = "genai_config.json"


def findings(folder: Path) -> Iterator[Finding]:
    """Yield errors of onnxruntime-genai in a folder.

    Raises:
        ModelError: the folder is missing.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder; name that of {CONFIG}")
    config, problem = read_json(folder / CONFIG)
    # a folder of another kind gets a rule of its own, with the command that writes such a folder
    if problem == NO_FILE:
        yield broken("genai-none", str(folder), f"there is no {CONFIG}")
        return
    if problem:
        yield broken("genai-config", CONFIG, problem)
        return
    outside = [name for name in _values(config, "filename") if leaves(folder, name)]
    for file in outside:
        yield broken("genai-file", file, f"{CONFIG} names it, outside of the folder")
    for library in _values(config, "custom_ops_library"):
        yield broken("genai-library", library, "its code runs when the model is loaded")
    name = _decoder(config)
    if name is None:
        yield broken("genai-config", f"{CONFIG}, model.decoder.filename", "no name")
    elif name in outside:
        return
    elif not (folder / name).is_file():
        yield broken("genai-file", name, "there is no such file")
    else:
        yield from _model_findings(folder, name)


def _values(config: Any, key: str) -> list[str]:
    """Return the texts at a key, at any depth of a configuration."""
    values = list[str]()
    level = [config]
    # The depth is limited by ``parse_json``.
    while level:
        objects = [value for value in level if isinstance(value, dict)]
        values += strings_of([value.get(key) for value in objects])
        lists = [value for value in level if isinstance(value, list)]
        level = [inner for value in lists for inner in value]
        level += [inner for value in objects for inner in value.values()]
    return values


def _decoder(config: Any) -> str | None:
    """Return the file name of the decoder; None if it is missing."""
    # any level may be missing or of another type; the level below is then looked up in {}
    for key in ("model", "decoder", "filename"):
        config = object_of(config).get(key)
    # an empty name would be the folder itself
    return config if isinstance(config, str) and config else None


def _model_findings(folder: Path, name: str) -> Iterator[Finding]:
    try:
        # the values may take gigabytes, and no rule needs them
        model = onnx.load(folder / name, load_external_data=False)
    except MALFORMED as error:
        yield broken("genai-file", name, f"it is no ONNX model: {error}")
        return
    # all initializers of a model share a few files, so that each is reported once
    files = set[str]()
    for tensor in filter(uses_external_data, model.graph.initializer):
        files |= {part.value for part in tensor.external_data if part.key == "location"}
    # sets have no order; the findings do
    for file in sorted(files):
        if leaves(folder, file):
            text = f"{name} names it, outside of the folder"
            yield broken("genai-file", file, text)
        elif not (folder / file).is_file():
            yield broken("genai-file", file, f"{name} names it, and it is not there")
