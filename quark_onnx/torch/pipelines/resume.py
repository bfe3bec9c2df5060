"""BlockJournal: finished blocks of a model on disk, so that an interrupted run can be resumed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from quark_onnx.errors import ConfigError
from quark_onnx.torch.algorithms.base import Outcome
from quark_onnx.torch.checkpoints.atomic_file import State, put_in_place, save
from quark_onnx.torch.checkpoints.safetensors_io import Reader
from quark_onnx.torch.checkpoints.safetensors_writer import TensorFile
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.quantized_layer import Layers
from quark_onnx.torch.pipelines.report import TorchReport
from quark_onnx.version import __version__

_STATE = "state.json"
_OWN = re.compile(r"state\.tmp|(block|hidden|end)-\d+\.(safetensors|tmp|tmp\.values)")


@dataclass(frozen=True)
class StoredBlock:
    """What a report says of a block.

    Attributes:
        unreached: names of layers that the data has not reached.
        outcomes: what algorithms made of its layers.
    """

    unreached: Sequence[str] = ()
    outcomes: Sequence[Outcome] = ()

    @classmethod
    def of(cls, layers: Layers, report: TorchReport, before: int) -> StoredBlock:
        """That of layers which have just been quantized.

        Args:
            before: how many outcomes the report had then.
        """
        unreached = [
            name for name, (_, spec) in layers.items() if report.quantized[name] != spec
        ]
        return cls(unreached, report.outcomes[before:])

    def tell(self, report: TorchReport) -> None:
        """Write it into the report of another run."""
        for name in self.unreached:
            report.weight_only(name)
        report.outcomes += self.outcomes

    @classmethod
    def read(cls, text: str) -> StoredBlock:
        """That which ``text`` has written."""
        found = json.loads(text)
        return cls(found["unreached"], [Outcome(**each) for each in found["outcomes"]])

    def text(self) -> str:
        """All of it as JSON."""
        return json.dumps(asdict(self))


class BlockJournal:
    """Results of blocks, and the hidden states behind the last one, in a folder.

    Nothing without one.

    The folder belongs to one run: model, configuration, data and version of the program. Another
    run is refused.

    Args:
        folder: where; None keeps nothing.
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
                *_stamps({reader.file_of(name) for name in reader}),
            ),
            "configuration": _digest(repr(config), method),
            "version": __version__,
        }
        self._last = -1  # the last block that is done

    def begin(self, tensors: Iterable[Any]) -> None:
        """Open the folder for a run over data of which the model has made these tensors in front of
        its first block.

        Where one of its files is damaged or gone, all begins anew.

        Raises:
            ConfigError: it belongs to another run, or cannot be written.
        """
        if self._folder is None:
            return
        self._marks["data"] = _digest(
            *(tensor.float().cpu().numpy().tobytes() for tensor in tensors),
        )
        state = self._folder / _STATE
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if state.exists():
                found = json.loads(state.read_text(encoding="utf-8"))
                other = next(
                    (key for key in self._marks if found.get(key) != self._marks[key]),
                    None,
                )
                if other is not None:
                    raise ConfigError(
                        f"{self._folder} holds the work of another run: its {other}"
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
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{self._folder} cannot be used to resume from: {error}",
            ) from error

    def _clear(self) -> None:
        """Remove what is left of a run that did not say whose it was."""
        assert self._folder is not None
        names = {file.name for file in self._folder.iterdir()}
        own = {name for name in names if _OWN.fullmatch(name)}
        if others := names - own:
            raise ConfigError(
                f"{self._folder} holds other files, as {min(others)}; name an empty"
                " folder, or one to resume from",
            )
        for name in own:
            (self._folder / name).unlink()

    def find(self, index: int) -> tuple[dict[str, Any], StoredBlock] | None:
        """The tensors of a block that is done, and what the report says of it."""
        if self._folder is None or self._last < index:
            return None
        with safe_open(str(self._block(index)), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, StoredBlock.read(file.metadata()["kept"])

    def hidden(self, index: int, now: list[Any]) -> list[Any]:
        """The hidden states behind a block, if it is the last that is done.

        Those of now for an earlier one.
        """
        if self._folder is None or self._last != index:
            return now
        found = load_file(str(self._hidden(index)))
        return [found[str(place)] for place in range(len(found))]

    def keep(
        self,
        index: int,
        tensors: dict[str, Any],
        kept: StoredBlock,
        hidden: list[Any],
    ) -> None:
        """Keep what became of a block, and the hidden states behind it in place of those before."""
        if self._folder is None:
            return
        save(self._block(index), tensors, {"kept": kept.text()})
        put_in_place(self._hidden(index), lambda path: _write(path, hidden))
        self._hidden(index - 1).unlink(missing_ok=True)

    def state(self, index: int) -> State:
        """That of a piece of work on all blocks."""
        return State(
            (
                None
                if self._folder is None
                else self._folder / f"end-{index:05}.safetensors"
            ),
        )

    def _block(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"block-{index:05}.safetensors"

    def _hidden(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"hidden-{index:05}.safetensors"

    def _whole_until(self) -> int:
        """The last block that is done, and all before it.

        -1 where a file is damaged: no hidden states are left.
        """
        assert self._folder is not None
        states = sorted(self._folder.glob("hidden-*.safetensors"))
        if not states:
            return -1
        last = int(states[-1].stem.split("-")[1])
        try:
            for file in (*map(self._block, range(last + 1)), states[-1]):
                with safe_open(str(file), framework="pt"):
                    pass
        except (OSError, SafetensorError):
            for file in states:
                file.unlink()
            return -1
        return last


def _stamps(files: Iterable[Path]) -> Iterator[str]:
    """What tells another content of files without reading it."""
    for file in sorted(files):
        found = file.stat()
        yield f"{file.name} {found.st_size} {found.st_mtime_ns}"


def _write(path: Path, tensors: Iterable[Any]) -> None:
    """A file of tensors by their places, none of which is copied in memory."""
    file = TensorFile(path)
    try:
        for place, tensor in enumerate(tensors):
            file.add(str(place), tensor)
        file.close()
    finally:
        file.abandon()


def _digest(*parts: str | bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else part)
        found.update(b"\0")
    return found.hexdigest()[:16]
