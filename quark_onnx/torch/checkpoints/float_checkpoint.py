"""FloatCheckpoint: the folder of a float language model, opened once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quark_onnx.torch.checkpoints.meta_model import float_config_of, skeleton_of
from quark_onnx.torch.checkpoints.safetensors_io import Reader
from quark_onnx.torch.models.structure import heads_of, usually_float
from quark_onnx.torch.runtime.memory import set_large_apart


class FloatCheckpoint:
    """The tensors of a float language model, and the model with empty parameters.

    To open one has glibc return large arrays as soon as they are freed, in the whole process
    (``set_large_apart``).

    Args:
        folder: a Hugging Face folder with safetensors.
        trust_code: run Python files that it brings along.

    Attributes:
        folder, trust_code: the same.
        reader: of its tensors.

    Raises:
        ModelError: a file is missing or damaged, transformers does not know the model, or it is
            quantized already.
        MissingDependency: transformers is not installed.
    """

    def __init__(self, folder: Path | str, *, trust_code: bool = False) -> None:
        set_large_apart()
        self.folder, self.trust_code = Path(folder), trust_code
        self._config = float_config_of(self.folder, trust_code=trust_code)
        self.reader = Reader(self.folder)
        self._model: Any = None

    @classmethod
    def of(
        cls,
        source: FloatCheckpoint | Path | str,
        trust_code: bool = False,
    ) -> FloatCheckpoint:
        """What is open already as it is; a folder opened."""
        return (
            source
            if isinstance(source, FloatCheckpoint)
            else cls(source, trust_code=trust_code)
        )

    @property
    def model(self) -> Any:
        """To look at; its parameters are empty, its experts are taken apart."""
        if self._model is None:
            self._model = skeleton_of(self._config, trust_code=self.trust_code)
        return self._model

    def take_model(self) -> Any:
        """The model, to be changed; whoever asks later gets another."""
        model, self._model = self.model, None
        return model

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the layers that compute logits, which schemes leave float.

        None where the model has no head.
        """
        return heads_of(self.model)

    def usually_float(self, asked: Iterable[str] = ()) -> tuple[str, ...]:
        """Names of the layers that stay float unless a user asks for them: heads, and all outside
        of the language part.

        Args:
            asked: globs of names. One that matches such layers alone asks for them.
        """
        return usually_float(self.model, asked)
