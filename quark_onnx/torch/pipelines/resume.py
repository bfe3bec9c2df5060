"""BlockJournal: finished blocks on disk, so that an interrupted run can resume."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from calibrators.json_file import parse_json, read_json
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.version import __version__
from quark_onnx.torch.algorithms.base import Outcome
from quark_onnx.torch.checkpoints.atomic_file import State, put_in_place, save
from quark_onnx.torch.checkpoints.safetensors_io import Reader
from quark_onnx.torch.checkpoints.safetensors_writer import TensorFile
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.quantized_layer import Layers
from quark_onnx.torch.pipelines.report import TorchReport

logger = logging.getLogger(__name__)

_STATE = "state.json"
#: What to do about a damaged file.
_ANEW = "remove the folder to start anew"
#: Names of the journal's files; a folder with any other file is not touched.
_OWN = re.compile(r"state\.tmp|(block|hidden|end)-\d+\.(safetensors|tmp|tmp\.values)")


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
    """

    def __init__(
        self,
        folder: Path | None,
        reader: Reader,
        config: TorchConfig,
        method: str,
    ) -> None:
        self._folder = folder
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
        if self._folder is None:
            return
        # float32, as numpy has no bfloat16; the conversion is exact
        self._marks["data"] = _digest(
            *(tensor.float().cpu().numpy().tobytes() for tensor in tensors),
        )
        self._run = _digest(*self._marks.values())
        state = self._folder / _STATE
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # the marks are written before the first block, so that files without marks are
            # leftovers
            if state.exists():
                stored = read_json(state, "state", ConfigError, _ANEW).object()
                for key, mark in self._marks.items():
                    if key not in stored or stored[key].value != mark:
                        raise ConfigError(
                            f"{self._folder} holds the work of another run: its {key}"
                            " differs; name another folder to resume from, or remove it",
                        )
                self._last = self._whole_until()
            else:
                self._clear()
                put_in_place(
                    state,
                    lambda path: path.write_text(
                        json.dumps(self._marks, indent=1),
                        encoding="utf-8",
                    ),
                )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self._folder} cannot be used to resume from: {error}",
            ) from error

    def _clear(self) -> None:
        """Remove the files of a run without marks.

        The run stopped before writing them.
        """
        assert self._folder is not None
        names = {value.name for value in self._folder.iterdir()}
        journal_files = set(filter(_OWN.fullmatch, names))
        # a mistyped folder must not lose its files
        if others := names - journal_files:
            raise ConfigError(
                f"{self._folder} holds other files, as {min(others)}; name an empty"
                " folder, or one to resume from",
            )
        for name in journal_files:
            (self._folder / name).unlink()

    def find(self, index: int) -> tuple[dict[str, Any], StoredBlock] | None:
        """Return the tensors and report entries of a finished block, or None.

        Args:
            index: index of the block.

        Returns:
            Tensors by their names in the output checkpoint, and the entries for the report. None
            without a folder, or if the block is not finished.
        """
        if self._folder is None or self._last < index:
            return None
        with safe_open(str(self._block(index)), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, self._entries(index)

    def hidden(self, index: int, now: list[Any]) -> list[Any]:
        """Return the stored hidden states after the last finished block.

        For an earlier block, ``now`` is returned.

        Args:
            index: the index of the block.
            now: the current hidden states.
        """
        # states of earlier blocks are removed; blocks before the last one need none to be skipped
        if self._folder is None or self._last != index:
            return now
        states = load_file(str(self._hidden(index)))
        return [states[str(sample)] for sample in range(len(states))]

    def keep(
        self,
        index: int,
        tensors: dict[str, Any],
        kept: StoredBlock,
        hidden: list[Any],
    ) -> None:
        """Store a finished block and its output states, and remove earlier states.

        Args:
            index: index of the block.
            tensors: tensors by their names in the output checkpoint.
            kept: entries for the report.
            hidden: hidden states after the block, of all samples.
        """
        if self._folder is None:
            return
        # first the block, then the states, whose presence says that the block is complete
        notes = {"run": self._run, "block": str(index)}
        save(self._block(index), tensors, {**notes, "kept": kept.text()})
        put_in_place(self._hidden(index), lambda path: _write(path, hidden, notes))
        # only after the new states are in place, so that a crash never leaves none
        self._hidden(index - 1).unlink(missing_ok=True)

    def state(self, index: int) -> State:
        """Return the state file of an algorithm on all blocks."""
        if self._folder is None:
            return State(None)
        return State(self._folder / f"end-{index:05}.safetensors")

    def _block(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"block-{index:05}.safetensors"

    def _hidden(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"hidden-{index:05}.safetensors"

    def _check_notes(self, path: Path, index: int) -> Mapping[str, str]:
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

    def _entries(self, index: int) -> StoredBlock:
        """Return the report entries of a block; raises as ``_check_notes`` does."""
        return StoredBlock.read(
            self._check_notes(self._block(index), index).get("kept", "")
        )

    def _whole_until(self) -> int:
        """Return the index of the last finished block.

        The index is -1 if a file is damaged, or no file of this run, or if no hidden states are
        stored.
        """
        assert self._folder is not None
        states = sorted(self._folder.glob("hidden-*.safetensors"))
        if not states:
            return -1
        # numbers have five digits, so that names sort like numbers
        last = int(states[-1].stem.split("-")[1])
        file = states[-1]
        try:
            self._check_notes(file, last)
            for index in range(last + 1):
                file = self._block(index)
                self._entries(index)
        except (OSError, SafetensorError, ValueError) as error:
            logger.warning(
                "%s is damaged (%s): the run starts from the first block", file, error
            )
            for file in states:
                file.unlink()
            return -1
        return last


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
