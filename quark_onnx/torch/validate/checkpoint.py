"""Content of a Hugging Face folder, from its configuration and file headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calibrators.json_file import parse_json
from calibrators.limits import read_text
from quark_onnx.common.errors import ModelError
from quark_onnx.torch.runtime.checkpoint_folder import check_links
from quark_onnx.torch.runtime.safetensors_header import (
    Header,
    StoredTensor,
    read_header,
)
from quark_onnx.torch.validate.fields import is_names, object_of
from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.modules import Module, fused_parts, modules_of
from quark_onnx.torch.validate.rules import broken

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Files in which GPTQModel and AutoAWQ write the settings of a quantization.
SETTINGS = ("quantize_config.json", "quant_config.json")
NO_FILE = "there is no such file"
#: Ends of the names of classes with a head over the vocabulary.
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
#: Findings that leave tensors unknown.
_INCOMPLETE = {"file-damaged", "index-json", "no-weights"}


class Checkpoint:
    """Configuration and headers of a checkpoint.

    Args:
        folder: folder of the checkpoint.
        config: content of ``config.json``; empty if the file cannot be read.
        index: file names by tensor name, from the index; None without an index.
        headers: headers of the readable files, by file name.
        damage: findings while reading.
        settings: content of the files of ``SETTINGS`` that are there, by file name.

    Attributes:
        tensors: tensors by name; the last tensor if two have a common name.
        file_names: names of the files by the tensors that the files hold.
        is_whole: whether the headers of all files of weights were read.
        modules: modules with their tensors, by name.
        linears: the Linear layers, without head and embeddings.
        quantized_linears: the Linear layers whose weights are quantized.
        heads: the modules that compute logits.
        matrices: the Linear layers and the heads.
        layers: the Linear layers, and heads that are quantized like them.
        experts: the names of the modules of experts, sorted.
        text_config: configuration of the language model, as part of a multimodal model or not.
        quantization: the quantization_config; empty if missing.
        method: layout by the configuration, such as "quark"; "float" if not quantized.
    """

    def __init__(  # noqa: PLR0913
        self,
        folder: Path,
        config: dict[str, Any],
        index: dict[str, str] | None,
        headers: dict[str, Header],
        damage: Sequence[Finding] = (),
        settings: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.folder, self.config, self.index = folder, config, index
        self.headers, self.damage, self.settings = headers, damage, settings or {}
        self.tensors = dict[str, StoredTensor]()
        self.file_names = dict[str, str]()
        # headers are in the order of file names; a name in two files is a finding of
        # ``file_findings``
        for file, header in headers.items():
            self.tensors |= header.tensors
            self.file_names |= dict.fromkeys(header.tensors, file)
        wanted = {*(index or {}).values()}
        is_known = _INCOMPLETE.isdisjoint(finding.rule for finding in damage)
        self.is_whole = is_known and wanted <= headers.keys()
        self.modules = modules_of(self.tensors)
        modules = self.modules.values()
        self.linears = [module for module in modules if module.is_linear]
        self.quantized_linears = [
            module for module in self.linears if module.is_quantized
        ]
        self.heads = [module for module in modules if module.is_head]
        self.matrices = [
            module for module in modules if module.is_linear or module.is_head
        ]
        self.layers = [
            module
            for module in self.matrices
            if module.is_linear or module.is_quantized
        ]
        # modules outside of experts have an empty name
        self.experts = sorted({module.experts for module in modules} - {""})
        inner = object_of(config.get("text_config"))
        # keys of the whole model, such as tie_word_embeddings, hold unless the part overrides them
        self.text_config = {**config, **inner}
        # multimodal models may keep the settings of the language model in text_config; vLLM reads
        # compression_config where quantization_config is missing; an empty object in one place does
        # not hide the settings in a later one
        self.quantization = object_of(
            config.get("quantization_config")
            or inner.get("quantization_config")
            or config.get("compression_config")
        )
        method = self.quantization.get("quant_method")
        # vLLM lowers the name before it looks for a class
        self.method = method.lower() if isinstance(method, str) else ""
        if not self.quantization:
            self.method = "float"

    def modules_with(self, end: str) -> dict[str, Module]:
        """Return the modules that have a tensor of a name, by their names."""
        return {
            name: module
            for name, module in self.modules.items()
            if end in module.tensors
        }

    def tensor_today(self, name: str) -> StoredTensor | None:
        """Return the tensor of a current name, which may have an older one in the file."""
        parent, _, end = name.rpartition(".")
        # modules hold their tensors by current names, whatever the file calls them
        module = self.modules.get(parent)
        return module.tensors.get(end) if module else None

    def names_in_vllm(self, module: Module) -> list[str]:
        """Return the names by which vLLM looks up whether a layer is excluded.

        Returns:
            The name of the fused layer, if the layer is part of one, and then its own. An entry for
            the fused layer excludes all its parts; ``find_matching_patterns`` and
            ``is_layer_skipped`` of vLLM look for it first.
        """
        fused_name, _ = fused_parts(module, self.modules)
        return [fused_name, module.name] if fused_name else [module.name]

    @property
    def architecture(self) -> str:
        """The first class that the configuration names, or an empty string."""
        classes = self.config.get("architectures")
        # vLLM takes the first class that it knows; exports of all tools name exactly one
        return str(next(iter(classes), "")) if isinstance(classes, list) else ""

    @property
    def generates(self) -> bool:
        """Whether the model has a head over the vocabulary, by the name of its class.

        Classes of transformers for other tasks have heads of other names, such as score and
        classifier. A model without a class counts as a language model.
        """
        return not self.architecture or self.architecture.endswith(_GENERATING)

    @property
    def dtype(self) -> str:
        """The dtype in which transformers loads the model by default.

        Empty if the configuration has no dtype.
        """
        # transformers wrote torch_dtype before release 4.56, and reads both keys
        config = self.text_config
        return str(config.get("dtype") or config.get("torch_dtype") or "")


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint; damage becomes findings.

    Args:
        folder: folder with ``config.json`` and ``*.safetensors``.

    Raises:
        ModelError: the folder is missing, contains neither configuration nor tensors, or has a link
            that leaves it.
    """
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is no folder; name that of a Hugging Face checkpoint"
        )
    check_links(folder)
    # the file system returns names in any order; findings must not depend on it
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if not files and not (folder / CONFIG).is_file():
        raise ModelError(
            f"{folder} holds neither {CONFIG} nor *.safetensors: it is no Hugging Face checkpoint"
        )
    damage = list[Finding]()
    config = _read_object(folder / CONFIG, "config-json", damage)
    # optional: clients generate with defaults of their own without the file
    if (folder / "generation_config.json").is_file():
        _read_object(folder / "generation_config.json", "generation-config", damage)
    settings = dict[str, dict[str, Any]]()
    for name in SETTINGS:
        if (folder / name).is_file():
            settings[name] = _read_object(folder / name, "settings-differ", damage)
    index = _read_index(folder, damage)
    headers = dict[str, Header]()
    for file in _weights(files, index):
        try:
            headers[file.name] = read_header(file)
        # the operating system may not let it be read
        except (ModelError, OSError) as error:
            damage.append(broken("file-damaged", file.name, str(error)))
    if not files:
        damage.append(
            broken("no-weights", str(folder.name), "there is no *.safetensors")
        )
    return Checkpoint(folder, config, index, headers, tuple(damage), settings)


def _weights(files: list[Path], index: dict[str, str] | None) -> list[Path]:
    """Return the files that clients read: those of the index, or those in the usual layout."""
    # clients read no file that the index does not name, such as a copy in another layout
    if index is not None:
        return [file for file in files if file.name in set(index.values())]
    # transformers reads model.safetensors alone, even where other files lie beside it
    single = [file for file in files if file.name == SINGLE]
    # consolidated*.safetensors hold the same weights under Mistral's own names
    return single or [
        file for file in files if not file.name.startswith("consolidated")
    ]


def read_json(file: Path) -> tuple[Any, str]:
    """Return the value of a JSON file, and the problem of a file that cannot be read, or ""."""
    try:
        return parse_json(read_text(file), file.name, ValueError).value, ""
    # the text says more than the error of the operating system
    except FileNotFoundError:
        return None, NO_FILE
    except OSError as error:
        return None, f"it cannot be read: {error.strerror}"
    except ValueError as error:
        return None, str(error)


def _read_object(file: Path, rule: str, damage: list[Finding]) -> dict[str, Any]:
    """Return the JSON object of a file; an empty object and a finding if it has none."""
    value, problem = read_json(file)
    if not problem and not isinstance(value, dict):
        problem = f"it holds a {type(value).__name__} where an object should be"
    if problem:
        damage.append(broken(rule, file.name, problem))
    return object_of(value)


def _read_index(folder: Path, damage: list[Finding]) -> dict[str, str] | None:
    """Return the file names of the index by tensor name; None without a readable index."""
    if not (folder / INDEX).is_file():
        return None
    # a file that is no JSON has its finding already; only a sound file without weight_map needs
    # another
    before = len(damage)
    files = _read_object(folder / INDEX, "index-json", damage).get("weight_map")
    if files and isinstance(files, dict) and is_names([*files.values()]):
        return files
    if len(damage) == before:
        damage.append(
            broken("index-json", INDEX, "it has no weight_map from tensors to files")
        )
    return None
