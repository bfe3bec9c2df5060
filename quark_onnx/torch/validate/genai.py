"""Checks of a folder for onnxruntime-genai: its configuration and the files that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx.external_data_helper import uses_external_data

from calibrators.limits import read_text
from quark_onnx.errors import ModelError
from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.json_values import object_of
from quark_onnx.torch.validate.rules import broken

CONFIG = "genai_config.json"


def findings(folder: Path) -> Iterator[Finding]:
    """Yield errors of onnxruntime-genai in a folder.

    Raises:
        ModelError: the folder is missing.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder; name that of {CONFIG}")
    try:
        config = json.loads(read_text(folder / CONFIG))
    # a folder of another kind gets a rule of its own, with the command that writes such a folder
    except FileNotFoundError:
        yield broken("genai-none", str(folder), f"there is no {CONFIG}")
        return
    except OSError as error:
        text = f"it cannot be read: {error.strerror}"
        yield broken("genai-config", CONFIG, text)
        return
    except (ValueError, RecursionError) as error:
        yield broken("genai-config", CONFIG, f"it is no JSON: {error}")
        return
    name = _decoder(config)
    if name is None:
        yield broken("genai-config", f"{CONFIG}, model.decoder.filename", "no name")
    elif not (folder / name).is_file():
        yield broken("genai-file", name, "there is no such file")
    else:
        yield from _model_findings(folder, name)


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
    except DecodeError as error:
        yield broken("genai-file", name, f"it is no ONNX model: {error}")
        return
    # all initializers of a model share a few files, so that each is reported once
    files = set[str]()
    for tensor in filter(uses_external_data, model.graph.initializer):
        files |= {part.value for part in tensor.external_data if part.key == "location"}
    # sets have no order; the findings do
    for file in sorted(files):
        if not (folder / file).is_file():
            yield broken("genai-file", file, f"{name} names it, and it is not there")
