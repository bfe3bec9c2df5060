"""quantize_checkpoint: quantize a folder with one block in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.torch.algorithms.rotation.rotate import rotate_sources
from quark_onnx.torch.calibration.block_stream import batches
from quark_onnx.torch.checkpoints.export import described, untied
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import Layout, check_config, layout_named
from quark_onnx.torch.checkpoints.parameter_sources import Sources
from quark_onnx.torch.checkpoints.read_ahead import ReadAhead
from quark_onnx.torch.checkpoints.recast import with_type
from quark_onnx.torch.checkpoints.safetensors_io import (
    SHARD,
    Writer,
    other_files,
    read_json,
)
from quark_onnx.torch.config.torch_config import TorchConfig, require_config
from quark_onnx.torch.models.attention import notes_of
from quark_onnx.torch.models.checkpoint_names import float_matrices
from quark_onnx.torch.models.float_weights import notes_on_kept, notes_on_stacks
from quark_onnx.torch.pipelines.block import (
    missing_data,
    needs_data,
    rotations_of,
    specs_of,
)
from quark_onnx.torch.pipelines.file_run import FileRun
from quark_onnx.torch.pipelines.flow import quantize_with_data, quantize_without_data
from quark_onnx.torch.pipelines.in_memory import check_ranks, chosen_layers
from quark_onnx.torch.pipelines.report import TorchReport
from quark_onnx.torch.pipelines.resume import BlockJournal
from quark_onnx.torch.runtime import distributed
from quark_onnx.torch.runtime.checkpoint_folder import check_apart
from quark_onnx.torch.runtime.devices import device_named


@dataclass(frozen=True)
class Writing:
    """Settings for writing a checkpoint.

    Attributes:
        pack_method: the order of nibbles in AMD Quark's layout, "reorder" or "order".
        max_shard: the maximum size of a file in bytes.
        trust_code: run Python files of the checkpoint.
        resume: a folder that stores each finished block, so that the same call can resume;
            None stores nothing.
        layout: the storage layout, a key of ``quark_onnx.torch.checkpoints.layouts.LAYOUTS``.
        spill: a folder for hidden states that are not in use; None keeps them in memory.
        weight_format: "real_quantized" for codes, "fake_quantized" for dequantized floats.
        device: the device that runs blocks and computes codes, one block at a time: "cpu", "cuda",
            "cuda:1", or "auto" for the first GPU, if there is one.
    """

    pack_method: str = "reorder"
    max_shard: int = SHARD
    trust_code: bool = False
    resume: Path | None = None
    layout: str = "quark"
    spill: Path | None = None
    weight_format: str = "real_quantized"
    device: str = "cpu"

    def __post_init__(self) -> None:
        # raises for an unknown layout, pack method or weight format
        _ = self.form
        if not self.max_shard > 0:
            raise ConfigError(
                f"max_shard is {self.max_shard} bytes; it must be more than 0",
            )

    @property
    def form(self) -> Layout:
        """Return the named layout."""
        return layout_named(self.layout, self.pack_method, self.weight_format)


def quantize_checkpoint(  # noqa: PLR0913
    source: FloatCheckpoint | Path | str,
    data: Iterable[Any] | None,
    config: TorchConfig,
    output: Path | str,
    *,
    writing: Writing | None = None,
    progress: bool | None = None,
) -> TorchReport:
    """Quantize a checkpoint of a language model into another folder.

    Memory holds one block of the model, its codes, and the hidden states of the data. Tensors that
    stay float, and all other files, are copied.

    Args:
        source: a Hugging Face folder with safetensors, or an opened checkpoint.
        data: batches of token ids or dicts of keywords; needed to calibrate activation scales, else
            None. If torch.distributed is initialized, each process gets all data, and runs a part;
            the first process writes.
        config: the quantization configuration.
        output: the output folder; may exist only if it is empty.
        writing: settings for writing; the defaults if None.
        progress: whether to show a progress bar; None shows it if stderr is a terminal.

    Returns:
        The report on all layers.

    Raises:
        ConfigError: the folder is not empty, a name matches no layer, no layer would be quantized,
            or the layout does not support a format.
        DataError: data is needed and missing, or the model cannot be run on it.
        ModelError: a file is missing or damaged, or holds NaN or infinity.
    """
    require_config(config)
    _check_arguments(source, data, output)
    output, writing = Path(output), writing or Writing()
    layout = writing.form
    check_config(layout, config)
    # weights are rounded with scales of the type that the layout stores
    config = layout.adapted(config)
    source = FloatCheckpoint.of(source, writing.trust_code)
    # nothing is written into the folder of the model
    for folder in (output, writing.resume, writing.spill):
        check_apart(folder, source.folder)
    # the run fills and empties the model's parameters, so that nobody else may hold it
    reader, model = source.reader, source.take_model()
    chosen, kept = chosen_layers(model, config, reader)
    measured = needs_data(chosen, config)
    if measured and data is None:
        raise DataError(missing_data(chosen))
    check_ranks(config)
    _check_resume(writing)
    # before rotations, which rename layers
    notes = notes_of(model, chosen, config, kept)
    notes += notes_on_stacks(model) + notes_on_kept(kept)
    notes += reader.notes
    report = TorchReport(specs_of(chosen), kept, notes)
    others = other_files(source.folder)
    content = _content(source.folder)
    run = FileRun(
        model,
        config,
        chosen,
        report,
        Sources(reader, model),
        layout,
        BlockJournal(writing.resume, reader, config, repr(layout)),
        ReadAhead(),
        writing.spill,
        device_named(writing.device),
        # algorithms change the weights for which the stored codes were made
        source.codes_of if source.decoded and not config.algorithms else None,
    )
    # a missing tensor is found here, and not after hours
    run.check()
    rotated = [
        rotate_sources(model, run.sources, rotation)
        for rotation in rotations_of(config)
    ]
    if any(rotation.untied for rotation in rotated):
        # rotations rewrite embedding and head in different ways, so that they cannot stay tied
        content = untied(content)
    # raises errors before the run, and not at its end
    matrices = float_matrices(reader.tensors)
    described(content, model, config, layout, report.quantized, matrices)
    is_first = distributed.is_first()
    # one bar for all processes
    progress = progress if is_first else False
    with ExitStack() as stack:
        stack.enter_context(run.ahead)
        if is_first:
            # the other processes compute the same tensors, and write none
            run.writer = stack.enter_context(Writer(output, writing.max_shard))
        if measured:
            samples = distributed.own_part(list(batches(data or ())))
            quantize_with_data(run, samples, progress)
        # without data there is nothing to share
        elif is_first:
            quantize_without_data(run, progress)
        if run.writer is not None:
            run.write_rest()
            run.writer.write_json(
                "config.json",
                described(
                    content,
                    model,
                    config,
                    layout,
                    report.quantized,
                    float_matrices(run.writer.written),
                ),
            )
            # tokenizer, generation settings and the like
            for file in others:
                run.writer.copy(file)
    distributed.wait_for_all()
    if is_first:
        report.note_idle(config.algorithms)
    return report


def _check_arguments(source: object, data: object, output: object) -> None:
    """Raise ConfigError for arguments in another order than model, data, config, output.

    A folder is a path; batches are an iterable of tensors, which a path is not.
    """
    order = "The order of arguments is model, data, config, output"
    for name, value in {"source": source, "output": output}.items():
        types = (str, Path) if name == "output" else (str, Path, FloatCheckpoint)
        if not isinstance(value, types):
            raise ConfigError(
                f"{name} is a {type(value).__name__}; it must be a folder. {order}"
            )
    if isinstance(data, str | Path):
        raise ConfigError(
            f"data is a {type(data).__name__}; it must be batches of token ids, or None."
            f" ``ptq`` reads texts. {order}"
        )


def _check_resume(writing: Writing) -> None:
    """Raise ConfigError if several processes would share a folder of finished blocks."""
    # other processes would need the hidden states of their own samples
    if writing.resume is not None and distributed.count() > 1:
        raise ConfigError(
            f"resume is {writing.resume}, but finished blocks are stored by a single"
            " process; leave it out, or run one process",
        )


def _content(folder: Path) -> dict[str, Any]:
    """Return the config.json of a model; float64 becomes float32, as its tensors do."""
    content = read_json(folder / "config.json")
    if "float64" in (content.get("dtype"), content.get("torch_dtype")):
        return with_type(content, "float32")
    return content
