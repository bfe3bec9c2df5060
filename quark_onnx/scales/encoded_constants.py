"""Codes of constants, shared by the models that a run inserts pairs into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from calibrators import Grid, QParams
from calibrators.onnx_runtime.external_tensors import is_stored
from calibrators.onnx_runtime.tensors import tensor_bytes
from quark_onnx.dtypes import Scaled
from quark_onnx.files.model_file import LEAST, hold_raw
from quark_onnx.graph import Graph
from quark_onnx.patterns.weight_axes import Layout


@dataclass(frozen=True)
class Encoding:
    """A constant and the parameters that decide its codes.

    Attributes:
        source: the float tensor, which is replaced on a change and never written to.
        params: scale and zero point.
        dtype: the type of the codes.
        grid: the range of the codes.
        flat: whether the codes are stored as a matrix.
        layout: arrangement in which the codes are stored.
    """

    source: TensorProto
    params: QParams
    dtype: Scaled
    grid: Grid
    flat: bool
    layout: Layout | None = None

    def gives_codes_of(self, other: Encoding) -> bool:
        """Return whether both encodings are of the same objects."""
        # Identity instead of equality: comparing large weights would take as long as encoding them.
        same = self.source is other.source and self.params is other.params
        kind = (self.dtype, self.grid, self.flat, self.layout)
        return same and kind == (other.dtype, other.grid, other.flat, other.layout)


@dataclass
class EncodedConstants:
    """The latest codes of every constant, by the name under which they are stored.

    The scale search and the check of corrected biases insert pairs with equal weights several
    times.
    """

    _known: dict[str, tuple[Encoding, TensorProto]] = field(default_factory=dict)
    # By the name of the codes: the codes, and a tensor that refers to an array with them.
    _held: dict[str, tuple[TensorProto, TensorProto, NDArray[Any]]] = field(
        default_factory=dict
    )

    def find(self, name: str, encoding: Encoding) -> TensorProto | None:
        """Return the stored codes; None if they are not known or are of something else.

        Args:
            name: name under which the codes are stored.
            encoding: the constant and the parameters, compared by identity.
        """
        if name not in self._known:
            return None
        known, codes = self._known[name]
        return codes if known.gives_codes_of(encoding) else None

    def keep(self, name: str, encoding: Encoding, codes: TensorProto) -> None:
        """Store the codes of a constant instead of earlier ones."""
        # One entry per name bounds the memory; the encoding keeps its objects alive, so that
        # identities hold.
        self._known[name] = (encoding, codes)

    def share(self, graph: Graph) -> None:
        """Let a graph refer to arrays with its large codes.

        Sessions on such graphs read the arrays, instead of a copy of the codes each. The arrays
        last as long as these codes are the latest.

        Args:
            graph: a graph with codes of ``find``, and with constants of its own; changed in place.
        """
        for name, (_, codes) in self._known.items():
            if graph.initializers.get(name) is not codes:
                continue
            held = self._held_codes(name, codes)
            if held is not None:
                graph.initializers[name] = held

    def _held_codes(self, name: str, codes: TensorProto) -> TensorProto | None:
        """Return a tensor that refers to an array; None for small ones, 4 bits, and files.

        Args:
            name: name under which the codes are stored.
            codes: the latest codes.
        """
        known = self._held.get(name)
        if known is not None and known[0] is codes:
            return known[1]
        # Codes of a large model are in a file, which sessions map.
        if is_stored(codes) or tensor_bytes(codes) < LEAST:
            return None
        held = TensorProto(name=name, data_type=codes.data_type, dims=codes.dims)
        array = hold_raw(held, np.frombuffer(codes.raw_data, np.uint8))
        if array is None:
            return None
        self._held[name] = (codes, held, array)
        return held
