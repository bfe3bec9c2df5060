"""Checkpoint: what a Hugging Face folder holds, read from its configuration and the headers of its
weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from calibrators.limits import read_text
from quark_onnx.errors import ModelError
from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.header import Header, Tensor, read_header
from quark_onnx.torch.validate.modules import Module, modules_of
from quark_onnx.torch.validate.rules import broken

CONFIG, INDEX, SINGLE = (
    "config.json",
    "model.safetensors.index.json",
    "model.safetensors",
)


@dataclass(frozen=True)
class Checkpoint:
    """What was read.

    Attributes:
        folder: where.
        config: ``config.json``; empty where it cannot be read.
        index: which file has which tensor, as the index says; None without an index.
        headers: of the files that could be read, by their names.
        damage: what was found while reading.
    """

    folder: Path
    config: dict[str, Any]
    index: dict[str, str] | None
    headers: dict[str, Header]
    damage: tuple[Finding, ...]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors; of two with one name, the last."""
        return {
            name: tensor
            for header in self.headers.values()
            for name, tensor in header.tensors.items()
        }

    @cached_property
    def modules(self) -> dict[str, Module]:
        """The tensors by the module that they belong to."""
        return modules_of(self.tensors)

    @cached_property
    def quantization(self) -> dict[str, Any]:
        """The quantization in the configuration; empty where there is none."""
        text = self.config.get("text_config")
        inner = text.get("quantization_config") if isinstance(text, dict) else None
        found = (
            self.config.get("quantization_config")
            or inner
            or self.config.get("compression_config")
        )
        return found if isinstance(found, dict) else {}

    @property
    def method(self) -> str:
        """The layout that the configuration names, such as "quark"; "float" without one."""
        if not self.quantization:
            return "float"
        return str(self.quantization.get("quant_method", "")).lower()

    @property
    def dtype(self) -> str:
        """The type that transformers loads the model in unless told otherwise.

        Empty if the configuration has none.
        """
        return str(
            self.text_config.get("dtype") or self.text_config.get("torch_dtype") or "",
        )

    @property
    def text_config(self) -> dict[str, Any]:
        """The configuration of the language model, which is a part of that of a multimodal model."""  # noqa: E501
        inner = self.config.get("text_config")
        return {**self.config, **inner} if isinstance(inner, dict) else self.config


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint; damage becomes findings.

    Args:
        folder: with ``config.json`` and ``*.safetensors``.

    Raises:
        ModelError: there is no such folder, or it holds neither of these.
    """
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is no folder; name that of a Hugging Face checkpoint",
        )
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if not files and not (folder / CONFIG).is_file():
        raise ModelError(
            f"{folder} holds neither {CONFIG} nor *.safetensors: it is no Hugging Face checkpoint",
        )
    damage = list[Finding]()
    config = _read_json(folder / CONFIG, "config-json", damage)
    if (folder / "generation_config.json").is_file():
        _read_json(folder / "generation_config.json", "generation-config", damage)
    index = _read_index(folder, damage)
    headers = {}
    for file in _weights(files, index):
        try:
            headers[file.name] = read_header(file)
        except ModelError as error:
            damage.append(broken("file-damaged", file.name, str(error)))
    if not files:
        damage.append(
            broken("no-weights", str(folder.name), "there is no *.safetensors"),
        )
    return Checkpoint(folder, config, index, headers, tuple(damage))


def _weights(files: list[Path], index: dict[str, str] | None) -> list[Path]:
    """The files that clients read: those of the index.

    Without one, all but the copies in other layouts.
    """
    if index is not None:
        return [file for file in files if file.name in set(index.values())]
    single = [file for file in files if file.name == SINGLE]
    return single or [
        file for file in files if not file.name.startswith("consolidated")
    ]


def _read_json(file: Path, rule: str, damage: list[Finding]) -> dict[str, Any]:
    try:
        found = json.loads(read_text(file))
    except FileNotFoundError:
        problem = "there is no such file"
    except (ValueError, RecursionError) as error:
        problem = f"it is no JSON: {error}"
    else:
        if isinstance(found, dict):
            return found
        problem = f"it holds a {type(found).__name__} where an object should be"
    damage.append(broken(rule, file.name, problem))
    return {}


def _read_index(folder: Path, damage: list[Finding]) -> dict[str, str] | None:
    if not (folder / INDEX).is_file():
        return None
    before = len(damage)
    found = _read_json(folder / INDEX, "index-json", damage).get("weight_map")
    whole = isinstance(found, dict) and all(
        isinstance(name, str) for name in found.values()
    )
    if isinstance(found, dict) and whole:
        return found
    if len(damage) == before:
        damage.append(
            broken("index-json", INDEX, "it has no weight_map from tensors to files"),
        )
    return None
