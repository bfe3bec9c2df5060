"""BlockJournal: finished blocks on disk, so that an interrupted run can resume."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from calibrators.json_file import parse_json
from quark_onnx.common.resume_folder import ResumeFolder
from quark_onnx.common.version import __version__
from quark_onnx.torch.algorithms.base import Outcome
from quark_onnx.torch.checkpoints.atomic_file import State, save
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader
from quark_onnx.torch.checkpoints.safetensors_writer import TensorFile
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.quantized_layer import Layers
from quark_onnx.torch.pipelines.report import TorchReport

logger = logging.getLogger(__name__)

#: Names of the journal's files; a folder with any other file is not touched.
_NAMES = re.compile(r"(block|hidden|end)-\d+\.safetensors")


@dataclass(frozen=True)
class Lengths:
    """Number of entries in the lists of a report, to which each block appends.

    Attributes:
        outcomes: number of results of algorithms.
        notes: number of notes.
        kept_codes: number of layers that keep the checkpoint's codes.
    """

    outcomes: int
    notes: int
    kept_codes: int

    @classmethod
    def of(cls, report: TorchReport) -> Lengths:
        """Count the entries of a report."""
        return cls(len(report.outcomes), len(report.notes), len(report.kept_codes))


@dataclass(frozen=True)
class StoredBlock:
    """Report entries of a finished block.

    Attributes:
        unreached: names of layers that were not activated during calibration.
        outcomes: results of algorithms on the block's layers.
        notes: notes for the user on the block's layers.
        kept_codes: names of layers that keep the checkpoint's codes.
    """

    unreached: Sequence[str] = ()
    outcomes: Sequence[Outcome] = ()
    notes: Sequence[str] = ()
    kept_codes: Sequence[str] = ()

    @classmethod
    def of(cls, layers: Layers, report: TorchReport, before: Lengths) -> StoredBlock:
        """Collect the report entries of layers that have just been quantized.

        Args:
            layers: the layers with their specs.
            report: the report.
            before: the number of the report's entries before the block.
        """
        unreached = [
            # ``TorchReport.weight_only`` replaces the spec of a layer without a scale
            name
            for name, (_, spec) in layers.items()
            if report.quantized[name] != spec
        ]
        return cls(
            unreached,
            report.outcomes[before.outcomes :],
            report.notes[before.notes :],
            report.kept_codes[before.kept_codes :],
        )

    def tell(self, report: TorchReport) -> None:
        """Add the entries to the report of a resumed run."""
        for name in self.unreached:
            # the spec alone: the note of ``weight_only`` is among the notes
            report.quantized[name] = LayerSpec(report.quantized[name].weight)
        report.outcomes += self.outcomes
        report.notes += self.notes
        report.kept_codes += self.kept_codes

    @classmethod
    def read(cls, text: str) -> StoredBlock:
        """Parse the JSON of ``text``.

        Raises:
            ValueError: the text is no JSON, or has other entries than ``text()`` writes.
        """
        entries = parse_json(text, "the report of a block", ValueError).value
        try:
            outcomes = [Outcome(**outcome) for outcome in entries.pop("outcomes")]
            block = cls(outcomes=outcomes, **entries)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no entries of a report: {error}") from error
        for names in (block.unreached, block.notes, block.kept_codes):
            if not isinstance(names, list) or not all(
                isinstance(name, str) for name in names
            ):
                raise ValueError(f"{names} is no list of texts")
        return block

    def text(self) -> str:
        """Return the entries as JSON."""
        return json.dumps(asdict(self))


class BlockJournal:
    """Folder with the results of blocks, and the hidden states after the last one.

    The folder belongs to one run: model, configuration, data and version of the program. A
    different run is refused.

    Args:
        folder: the folder; None stores nothing.
        reader: the float checkpoint.
        config: the quantization configuration.
        method: a description of the storage layout.

    Raises:
        ConfigError: the folder cannot be created or written to.
    """

    def __init__(
        self,
        folder: Path | None,
        reader: CheckpointReader,
        config: TorchConfig,
        method: str,
    ) -> None:
        self._is_kept = folder is not None
        self._results = ResumeFolder(folder)
        self._results.open()
        self._marks = {
            "model": _digest(
                *(f"{name} {reader.shape(name)}" for name in reader),
                # size and time instead of content: reading a large checkpoint takes minutes
                *_stamps(set(map(reader.file_of, reader))),
            ),
            "configuration": _digest(repr(config), method),
            # another version may compute other codes
            "version": __version__,
        }
        self._last = -1  # the last block that is done
        self._run = ""  # identifies the run in each of its files

    def begin(self, tensors: Iterable[Any]) -> None:
        """Open the folder for a run.

        If one of the files is damaged or missing, the run starts from the first block.

        Args:
            tensors: the inputs of the first block, which identify the data.

        Raises:
            ConfigError: the folder belongs to a different run, or cannot be written.
        """
        if not self._is_kept:
            return
        # float32, as numpy has no bfloat16; the conversion is exact
        self._marks["data"] = _digest(
            *(tensor.float().cpu().numpy().tobytes() for tensor in tensors),
        )
        self._run = _digest(*self._marks.values())
        # the marks are written before the first block, so that files without marks are leftovers
        if self._results.claim(self._marks, _NAMES):
            self._last = self._whole_until()

    def find(self, index: int) -> tuple[dict[str, Any], StoredBlock] | None:
        """Return the tensors and report entries of a finished block, or None.

        Args:
            index: index of the block.

        Returns:
            Tensors by their names in the output checkpoint, and the entries for the report. None
            without a folder, or if the block is not finished.
        """
        if self._last < index:
            return None
        path = self._results.path(_block(index))
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, self._entries(index, path)

    def hidden(self, index: int, now: list[Any]) -> list[Any]:
        """Return the stored hidden states after the last finished block.

        For an earlier block, ``now`` is returned.

        Args:
            index: the index of the block.
            now: the current hidden states.
        """
        # states of earlier blocks are removed; blocks before the last one need none to be skipped
        if self._last != index:
            return now
        states = load_file(str(self._results.path(_hidden(index))))
        return [states[str(sample)] for sample in range(len(states))]

    def keep(
        self,
        index: int,
        tensors: dict[str, torch.Tensor],
        kept: StoredBlock,
        hidden: list[torch.Tensor],
    ) -> None:
        """Store a finished block and its output states, and remove earlier states.

        Args:
            index: index of the block.
            tensors: tensors by their names in the output checkpoint.
            kept: entries for the report.
            hidden: hidden states after the block, of all samples.
        """
        if not self._is_kept:
            return
        # first the block, then the states, whose presence says that the block is complete
        notes = {"run": self._run, "block": str(index)}
        block_notes = {**notes, "kept": kept.text()}
        is_kept = self._results.keep(
            _block(index), lambda path: save(path, tensors, block_notes)
        ) and self._results.keep(
            _hidden(index), lambda path: _write(path, hidden, notes)
        )
        # only after the new states are in place, so that a crash never leaves none
        if is_kept:
            self._results.remove(_hidden(index - 1))

    def state(self, index: int) -> State:
        """Return the state file of an algorithm on all blocks."""
        return State(self._results, f"end-{index:05}.safetensors")

    def _notes(self, index: int, path: Path) -> Mapping[str, str]:
        """Return the metadata of a file, which must be that of a block of this run.

        Opening a file reads its header, which must fit the size of the file.

        Raises:
            OSError: the file cannot be read.
            SafetensorError: the file is damaged.
            ValueError: the file is that of another block or run.
        """
        with safe_open(str(path), framework="pt") as file:
            notes: Mapping[str, str] = file.metadata() or {}
        if notes.get("run") != self._run or notes.get("block") != str(index):
            raise ValueError("it is a file of another block or run")
        return notes

    def _entries(self, index: int, path: Path) -> StoredBlock:
        """Return the report entries of a block; raises as ``_notes`` does."""
        return StoredBlock.read(self._notes(index, path).get("kept", ""))

    def _whole_until(self) -> int:
        """Return the index of the last finished block.

        The index is -1 if a file is damaged, or no file of this run, or if no hidden states are
        stored.
        """
        states = [
            name
            for name in self._results.names("hidden-*.safetensors")
            if _NAMES.fullmatch(name)
        ]
        if not states:
            return -1
        # numbers have five digits, so that names sort like numbers
        last = int(Path(states[-1]).stem.split("-")[1])
        is_whole = (
            self._results.read(states[-1], partial(self._notes, last)) is not None
        )
        for index in range(last + 1):
            entries = self._results.read(_block(index), partial(self._entries, index))
            is_whole &= entries is not None
        if is_whole:
            return last
        logger.warning("a finished block is lost: the run starts from the first block")
        for name in states:
            self._results.remove(name)
        return -1


def _block(index: int) -> str:
    return f"block-{index:05}.safetensors"


def _hidden(index: int) -> str:
    return f"hidden-{index:05}.safetensors"


def _stamps(files: Iterable[Path]) -> Iterator[str]:
    """Yield name, size and time of files, to detect changes without reading them."""
    for file in sorted(files):
        status = file.stat()
        yield f"{file.name} {status.st_size} {status.st_mtime_ns}"


def _write(path: Path, tensors: Iterable[Any], notes: Mapping[str, str]) -> None:
    """Write tensors by index into a file with metadata, without copying them in memory."""
    file = TensorFile(path, notes)
    try:
        for index, tensor in enumerate(tensors):
            file.add(str(index), tensor)
        file.close()
    finally:
        file.abandon()


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        # a separator, so that ("ab", "c") and ("a", "bc") differ
        digest.update(b"\0")
    # 64 bits are enough to tell two runs apart
    return digest.hexdigest()[:16]
