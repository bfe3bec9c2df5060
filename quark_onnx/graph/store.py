"""Store: a file for large tensors while a model is processed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, numpy_helper

from calibrators.onnx_runtime.external_tensors import locate
from calibrators.onnx_runtime.tensors import PAGE, estimate_bytes
from calibrators.scratch import ScratchFolder
from quark_onnx.common.errors import ModelError, system_reason

#: Tensors of fewer bytes stay in memory.
LEAST = 1 << 16
#: Models with more bytes of weights are processed through a store.
LARGE_MODEL = 400_000_000
#: The same where weights alone are quantized, which decide the peak of the memory then.
LARGE_WEIGHTS = 16_000_000
#: Values converted or written at a time.
PART = 1 << 20


class Store:
    """A growing temporary file until ``close``."""

    def __init__(self, near: Path | None = None) -> None:
        """Create the file in the folder of ``near``, or in the system's temporary folder."""
        folder = Path(gettempdir())
        if near is not None:
            # The output folder may not exist yet: the nearest one above is on the same disk.
            folder = next(
                parent for parent in near.absolute().parents if parent.exists()
            )
        self._near = near
        with self._writing():
            self._folder = ScratchFolder(folder, "weights")
        self.weights_path = self._folder.path / "weights.bin"

    def put(self, name: str, array: NDArray[Any]) -> TensorProto:
        """Return a tensor with values in the file, or in memory if small."""
        if array.nbytes < LEAST:
            return numpy_helper.from_array(array, name)
        flat = array.reshape(-1)
        parts = (flat[start : start + PART] for start in range(0, flat.size, PART))
        return self.put_parts(name, array.shape, parts)

    def put_parts(
        self,
        name: str,
        shape: tuple[int, ...],
        parts: Iterable[NDArray[Any]],
    ) -> TensorProto:
        """Return a tensor whose values arrive in parts, in the order of the array.

        Args:
            name: name of the tensor.
            shape: shape of the whole tensor.
            parts: arrays of one type, with as many values together as the shape, written one by
                one. All but the last fill whole bytes.
        """
        length = 0
        kind = int(TensorProto.FLOAT)
        with self._writing(), self.weights_path.open("ab") as file:
            offset = file.seek(0, os.SEEK_END)
            # Zeros up to the next multiple of PAGE.
            offset += file.write(bytes(-offset % PAGE))
            for part in parts:
                # Types of less than a byte are packed.
                proto = numpy_helper.from_array(part)
                kind = proto.data_type
                length += file.write(proto.raw_data)
        tensor = TensorProto(name=name, data_type=kind, dims=shape)
        locate(tensor, self.weights_path, offset, length)
        return tensor

    def converted(
        self,
        tensor: TensorProto,
        source: NDArray[Any],
        dtype: type[Any],
    ) -> TensorProto:
        """Return a tensor converted to another type, a part at a time.

        Args:
            tensor: the tensor, for its name and shape.
            source: its values.
            dtype: NumPy type to convert to.
        """
        flat = source.reshape(-1)
        step = PART
        parts = (
            # A part at a time, so that source and result are never both whole in memory.
            flat[start : start + step].astype(dtype)
            for start in range(0, flat.size, step)
        )
        return self.put_parts(tensor.name, tuple(tensor.dims), parts)

    def close(self) -> None:
        """Remove the file."""
        self._folder.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Convert errors, and name the folder as the user knows it."""
        try:
            yield
        except OSError as error:
            folder = f"the temporary folder {gettempdir()} (see TMPDIR)"
            if self._near:
                folder = f"the folder of {self._near}"
            raise ModelError(
                f"weights cannot be worked on in {folder}: {system_reason(error)}",
            ) from error


def store_for(
    model: ModelProto, near: Path | None, *, weights_only: bool = False
) -> Store | None:
    """Return a store for a large model; None for a small model."""
    limit = min(LARGE_MODEL, LARGE_WEIGHTS) if weights_only else LARGE_MODEL
    if estimate_bytes(model) > limit:
        return Store(near)
    return None
