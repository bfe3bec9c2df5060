"""FloatCheckpoint: the folder of a float language model, opened once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quark_onnx.errors import ModelError
from quark_onnx.torch.checkpoints.decoded import DecodedTensor, decoded_reader
from quark_onnx.torch.checkpoints.meta_model import config_of, dtype_of, skeleton_of
from quark_onnx.torch.checkpoints.parameter_sources import Sources, fill, missing_of
from quark_onnx.torch.checkpoints.safetensors_io import Reader, read_json
from quark_onnx.torch.checkpoints.unsaved import compute_unsaved
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.structure import heads_of, usually_float
from quark_onnx.torch.runtime.memory import set_large_apart


class FloatCheckpoint:
    """The tensors of a float language model, and the model with empty parameters.

    To open one has glibc return large arrays as soon as they are freed, in the whole process
    (``set_large_apart``).

    Args:
        folder: a Hugging Face folder with safetensors. Checkpoints that are quantized by a method
            of ``decoded.METHODS`` are decoded tensor by tensor.
        trust_code: run Python files that it brings along.

    Attributes:
        folder, trust_code: the same.
        reader: of its tensors.
        decoded: whether they are decoded from a quantized checkpoint.

    Raises:
        ModelError: a file is missing or damaged, transformers does not know the model, or it is
            quantized by a method that is not decoded.
        MissingDependency: transformers is not installed.
    """

    def __init__(self, folder: Path | str, *, trust_code: bool = False) -> None:
        set_large_apart()
        self.folder, self.trust_code = Path(folder), trust_code
        content = read_json(self.folder / "config.json")
        self.decoded = content.get("quantization_config") is not None
        self._config = config_of(self.folder, trust_code=trust_code)
        if self.decoded:
            self.reader = decoded_reader(self.folder, dtype_of(self._config))
        else:
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

    def load(self) -> Any:
        """The whole float model in memory.

        Raises:
            ModelError: a tensor is missing.
        """
        model = skeleton_of(self._config, trust_code=self.trust_code)
        sources = Sources(self.reader, model)
        compute_unsaved(model, sources)
        fill(model, "", sources)
        if hasattr(model, "tie_weights"):
            model.tie_weights()
        if missing := missing_of(model):
            raise ModelError(
                f"the checkpoint {self.folder} has no tensor {missing[0]!r}",
            )
        return model.eval()

    def codes_of(self, key: str) -> Quantized | None:
        """The codes that a tensor of a quantized checkpoint is decoded from.

        None where it was float, or has a format of another package.

        Args:
            key: the name of the tensor in the reader.
        """
        tensor = self.reader.tensors.get(key)
        if not isinstance(tensor, DecodedTensor) or tensor.codes is None:
            return None
        return tensor.codes()

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
