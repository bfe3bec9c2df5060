"""Checks of a folder for onnxruntime-genai, and of a checkpoint for its model builder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import uses_external_data

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.files.model_file import MALFORMED
from quark_onnx.torch.config.schemes import SCHEMES, fitting
from quark_onnx.torch.runtime import model_builder
from quark_onnx.torch.runtime.checkpoint_folder import leaves
from quark_onnx.torch.validate.checkpoint import NO_FILE, Checkpoint, read_json
from quark_onnx.torch.validate.fields import object_of, strings_of
from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.rules import broken

CONFIG = "genai_config.json"
#: Scheme of which 'llm oga' takes the greatest group that fits.
SCHEME = "uint4_wo_128"
#: Settings of AMD Quark's weights that the model builder reads; it takes any other for these.
_WEIGHT = {"dtype": "uint4", "qscheme": "per_group", "symmetric": False}


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


def check_readable(checkpoint: Checkpoint) -> None:
    """Raise ConfigError for a quantized checkpoint that the model builder does not read.

    The builder raises no error for most of them, and computes with wrong values.
    """
    if reason := unreadable(checkpoint):
        raise ConfigError(
            f"{checkpoint.folder}: {reason}; onnxruntime-genai's model builder reads"
            " checkpoints of the layouts oga and awq: give 'quark-onnx llm oga' the folder of"
            " the float model"
        )


def unreadable(checkpoint: Checkpoint) -> str:
    """Return why 'llm oga' takes no checkpoint of this content; empty if it does.

    A float model is quantized first, by the greatest group of ``SCHEME`` that fits.
    """
    if not (checkpoint.folder / "tokenizer_config.json").is_file():
        return (
            "it has no tokenizer_config.json, and the model builder needs the tokenizer;"
            " copy its files there"
        )
    layers = [module for module in checkpoint.linears if not module.is_head]
    for module in layers:
        if not model_builder.LAYERS.fullmatch(module.name):
            return f"the model builder has no place for {module.name}"
    if checkpoint.method == "float":
        widths = {module.matrix.shape[-1] for module in layers}
        return "" if fitting(SCHEMES[SCHEME], widths) else "no group divides the inputs"
    if checkpoint.method == "awq":
        return ""
    if checkpoint.method != "quark":
        return f"its quant_method is {checkpoint.method!r}"
    return _unreadable_quark(checkpoint)


def _unreadable_quark(checkpoint: Checkpoint) -> str:
    """Return why a checkpoint of AMD Quark does not have the layout oga; empty if it has."""
    settings = checkpoint.quantization
    weight = object_of(object_of(settings.get("global_quant_config")).get("weight"))
    for key, wanted in _WEIGHT.items():
        if weight.get(key) != wanted:
            return (
                f"its layout is quark, with {key} {weight.get(key)!r} for weights, and not"
                f" {wanted!r} as in the layout oga"
            )
    if weight.get("group_size") not in model_builder.BLOCKS:
        return f"it has groups of {weight.get('group_size')}"
    if object_of(settings.get("export")).get("pack_method") != "reorder":
        return "its codes are not in the order 'reorder'"
    others = [
        name
        for name in object_of(settings.get("layer_quant_config"))
        if name != "lm_head"
    ]
    if others:
        return f"{others[0]} has a scheme of its own"
    floats = [module for module in checkpoint.linears if not module.is_quantized]
    return f"{floats[0].name} is float" if floats else ""
