"""Output formats of a quantized model: a checkpoint, a GGUF file, an ONNX model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from calibrators.scratch import ScratchFolder
from quark_onnx.common.errors import ConfigError, MissingDependency, nearest
from quark_onnx.common.extras import pip_install
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.exports.gguf import check_gguf, write_quantized_gguf
from quark_onnx.torch.models.names import instances
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.models.structure import vocabulary_of
from quark_onnx.torch.pipelines.in_memory import chosen_layers
from quark_onnx.torch.runtime.checkpoint_folder import check_apart, check_free

#: Names in AMD Quark's script for a Hugging Face checkpoint, ``model.gguf`` and ``model.onnx``.
EXPORTS = ("hf_format", "gguf", "onnx")
#: Sequence length for tracing and verifying an ONNX model without a cache.
_TOKENS = 16


@contextmanager
def exported(
    kinds: Collection[str],
    source: FloatCheckpoint,
    config: TorchConfig,
    output: Path | str,
    notes: list[str],
) -> Iterator[Path]:
    """Yield the folder of the checkpoint, and write the other formats on success.

    GGUF and ONNX need the full quantized model in memory. Both files are written next to the
    checkpoint. If no checkpoint was requested, it lies in a temporary folder.

    Args:
        kinds: names of ``EXPORTS``.
        source: the float model.
        config: the configuration with which the context's body quantizes the model.
        output: the output folder; may exist only if it is empty.
        notes: list to which notes for the user are appended.

    Raises:
        ConfigError: a kind is unknown, or does not support the configuration. Nothing has been
            done.
        ModelError: the kind does not support the model.
        MissingDependency: a package is missing.
    """
    output = Path(output)
    _check(kinds, source, config, output)
    if "hf_format" in kinds:
        yield output
        _write(kinds, source, output, output, notes)
        return
    # The checkpoint is an intermediate result. A folder in the same parent can be renamed.
    output.parent.mkdir(parents=True, exist_ok=True)
    with ScratchFolder(output.parent, output.name) as folder:
        yield folder / "checkpoint"
        _write(kinds, source, folder / "checkpoint", output, notes)


def _check(
    kinds: Collection[str],
    source: FloatCheckpoint,
    config: TorchConfig,
    output: Path,
) -> None:
    """Raise the errors of ``exported`` that are known before a model is quantized."""
    if not kinds:
        raise ConfigError(
            f"nothing is to be written; name one or more of: {', '.join(EXPORTS)}",
        )
    for kind in kinds:
        if kind not in EXPORTS:
            raise ConfigError(
                f"unknown export {kind!r}{nearest(kind, EXPORTS)}; known:"
                f" {', '.join(EXPORTS)}",
            )
    check_free(output)
    check_apart(output, source.folder)
    if "gguf" in kinds and source.merged:
        raise ConfigError(
            "a GGUF file is written from the files of a model without adapter; save the"
            " merged model with peft's merge_and_unload() and save_pretrained first"
        )
    if "gguf" in kinds:
        check_gguf(source, chosen_layers(source.model, config, source.reader)[0])
    if "onnx" in kinds and (
        config.attention is not None
        or (config.kv_cache and config.kv_cache.where == "rope")
    ):
        raise ConfigError(
            "an ONNX model has no node for what attention rounds: rotated keys and"
            " probabilities; export none, or quantize without",
        )
    if "onnx" in kinds and find_spec("onnxscript") is None:
        raise MissingDependency(
            f"an ONNX model needs the package onnxscript: {pip_install('llm')}",
        )


def _write(
    kinds: Collection[str],
    source: FloatCheckpoint,
    checkpoint: Path,
    output: Path,
    notes: list[str],
) -> None:
    """Write the formats other than the checkpoint into the output folder.

    Args:
        notes: list to which notes for the user are appended.
    """
    if set(kinds) <= {"hf_format"}:
        return
    # The context's body has written the checkpoint.
    model = load_checkpoint(checkpoint, trust_code=source.trust_code)
    output.mkdir(parents=True, exist_ok=True)
    if "gguf" in kinds:
        notes += write_quantized_gguf(model, source.folder, output / "model.gguf").notes
        layers = instances(model, QuantizedLayer).values()
        if any(layer.input is not None or layer.output is not None for layer in layers):
            notes.append(
                "llama.cpp rounds activations its own way: model.gguf holds the weights"
                " alone",
            )
    if "onnx" in kinds:
        _write_onnx(model, output / "model.onnx", notes)


def _write_onnx(model: nn.Module, output: Path, notes: list[str]) -> None:
    """Write an ONNX model, with a key-value cache if its attention supports one."""
    from quark_onnx.torch.exports.onnx import export_decoder, write_onnx

    try:
        written = export_decoder(model, output)
    # GroupQueryAttention does not support every attention.
    except ConfigError as error:
        notes.append(f"model.onnx has no inputs for keys and values: {error}")
        # Two samples and several tokens, since torch's exporter specializes axes of size 1.
        tokens = torch.arange(2 * _TOKENS).reshape(2, _TOKENS) % vocabulary_of(model)
        written = write_onnx(model, {"input_ids": tokens}, output)
    notes += written.notes
    notes.append(
        "onnxruntime's outputs of model.onnx differ from torch's by"
        f" {written.difference:.1g}, relative",
    )
