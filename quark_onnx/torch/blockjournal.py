"""BlockJournal: the blocks of a model that are done, on disk, so that an interrupted run goes on where it was."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quark_onnx.errors import ConfigError
from quark_onnx.torch.checkpoint import Reader
from quark_onnx.torch.config import TorchConfig
from quark_onnx.version import __version__

_STATE = "state.json"


class BlockJournal:
    """Results of blocks, and the hidden states behind the last one, in a folder; nothing without one.

    The folder belongs to one run: model, configuration, data and version of the program. Another run is refused.

    Args:
        folder: where; None keeps nothing.
    """

    def __init__(self, folder: Path | None, reader: Reader, config: TorchConfig, method: str) -> None:
        self._folder = folder
        self._marks = {
            "model": _digest(
                *(f"{name} {reader.shape(name)} {reader.file_of(name).stat().st_size}" for name in reader)
            ),
            "configuration": _digest(repr(config), method),
            "version": __version__,
        }

    def begin(self, hidden: list[Any]) -> None:
        """Open the folder for a run over data with these hidden states in front of the first block.

        Raises:
            ConfigError: it belongs to another run, or cannot be written.
        """
        if self._folder is None:
            return
        self._marks["data"] = _digest(*(tensor.float().numpy().tobytes() for tensor in hidden))
        state = self._folder / _STATE
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if state.exists():
                found = json.loads(state.read_text(encoding="utf-8"))
                other = next((key for key in self._marks if found.get(key) != self._marks[key]), None)
                if other is not None:
                    raise ConfigError(
                        f"{self._folder} holds the work of another run: its {other} differs; name another folder to "
                        "resume from, or remove it"
                    )
            else:
                _replace(state, lambda path: path.write_text(json.dumps(self._marks, indent=1), encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._folder} cannot be used to resume from: {error}") from error

    def find(self, index: int) -> dict[str, Any] | None:
        """The tensors of a block that is done, where the hidden states of it or of a later one are there, too."""
        if self._folder is None or self._last() < index:
            return None
        try:
            return dict(load_file(str(self._folder / f"block-{index:05}.safetensors")))
        except (OSError, SafetensorError):
            return None

    def hidden(self, index: int, now: list[Any]) -> list[Any]:
        """The hidden states behind a block, if it is the last that is done; those of now for an earlier one."""
        if self._folder is None or self._last() != index:
            return now
        found = load_file(str(self._folder / f"hidden-{index:05}.safetensors"))
        return [found[str(place)] for place in range(len(found))]

    def keep(self, index: int, tensors: dict[str, Any], hidden: list[Any]) -> None:
        """Keep what became of a block, and the hidden states behind it in place of those before."""
        if self._folder is None:
            return
        own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        _replace(self._folder / f"block-{index:05}.safetensors", lambda path: save_file(own, str(path)))
        states = {str(place): tensor.contiguous().clone() for place, tensor in enumerate(hidden)}
        _replace(self._folder / f"hidden-{index:05}.safetensors", lambda path: save_file(states, str(path)))
        (self._folder / f"hidden-{index - 1:05}.safetensors").unlink(missing_ok=True)

    def _last(self) -> int:
        """The last block that is done; -1 for none."""
        assert self._folder is not None
        return max((int(file.stem.split("-")[1]) for file in self._folder.glob("hidden-*.safetensors")), default=-1)


def _replace(path: Path, write: Any) -> None:
    temporary = path.with_suffix(".tmp")
    write(temporary)
    temporary.replace(path)


def _digest(*parts: str | bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else part)
        found.update(b"\0")
    return found.hexdigest()[:16]
