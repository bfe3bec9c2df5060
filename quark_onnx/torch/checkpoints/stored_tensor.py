"""StoredTensor: a tensor in a safetensors file, which is read on request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from quark_onnx.common.errors import ModelError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StoredTensor:
    """Tensor in a file.

    Attributes:
        name: name in the checkpoint.
        shape: shape of the tensor.
        dtype: type name in safetensors files: "BF16", "I32".
        path: the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The tensors in files from which this tensor is read."""
        return (self,)

    def read(self) -> torch.Tensor:
        """Read the tensor, in its stored type.

        Raises:
            ModelError: the file cannot be read.
        """
        try:
            with safe_open(str(self.path), framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(self.name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{self.path}: the tensor {self.name!r} cannot be read: {error}",
            ) from error
