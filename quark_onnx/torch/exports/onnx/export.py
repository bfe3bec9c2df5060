"""write_onnx: write a quantized PyTorch model as an ONNX model with the same codes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import torch
from onnx import TensorProto
from torch import nn

from quark_onnx.common.errors import ModelError, nearest
from quark_onnx.config.checks import require, require_one_of
from quark_onnx.dtypes import Integer
from quark_onnx.files.io import staged
from quark_onnx.graph import Graph, Store
from quark_onnx.graph.store import LARGE_MODEL
from quark_onnx.torch.calibration.block_stream import Sample, inference
from quark_onnx.torch.exports.onnx.stand_in import standing_in
from quark_onnx.torch.exports.onnx.trace import Axes, Flat, axes_of, named, trace
from quark_onnx.torch.exports.onnx.verify import verify
from quark_onnx.torch.exports.onnx.write import FORMS, summary, write
from quark_onnx.torch.models.quantized_layer import QuantizedLayer

logger = logging.getLogger(__name__)

_TYPES = {
    "float32": (torch.float32, TensorProto.FLOAT),
    "float16": (torch.float16, TensorProto.FLOAT16),
}
#: Note on onnxruntime's fusion of DequantizeLinear and MatMul with weights of few bits.
_ROUNDS = (
    "onnxruntime rounds to int8 what it multiplies such weights with, about 1 % of it,"
    " unless a session sets session.qdq_matmulnbits_accuracy_level to 1"
)


@dataclass(frozen=True)
class Exported:
    """Written ONNX model.

    Attributes:
        path: the model; weights of a large model lie next to it in ``<name>.data``.
        layers: the operators of each quantized layer.
        difference: the largest relative difference (L2) between onnxruntime and torch at any
            output.
        notes: notes for the user.
    """

    path: Path
    layers: Mapping[str, str] = field(default_factory=dict)
    difference: float = 0.0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = summary(self.layers) or ["no quantized layer"]
        return "\n".join(
            [
                *lines,
                f"onnxruntime differs from torch by {self.difference:.1g}, relative",
                *self.notes,
            ],
        )


def write_onnx(  # noqa: PLR0913
    model: nn.Module,
    inputs: Sample,
    output: Path | str,
    *,
    form: str = "auto",
    dtype: str = "float32",
    dynamic: bool | Axes = True,
    external: bool = False,
) -> Exported:
    """Write a quantized model as ONNX.

    The file appears only after the outputs of onnxruntime and torch agree.

    Args:
        model: a model from ``quantize_model``; it is not changed. A language model is written
            without its key-value cache.
        inputs: example inputs: a tensor, a dict of keywords or a list of arguments.
        output: the file.
        form: the operators of weights: "qdq" with DequantizeLinear alone; "auto" with onnxruntime's
            MatMulNBits if it supports the codes; "operators" refuses blocks without support.
        dtype: dtype of the computation, "float32" or "float16".
        dynamic: names of dynamic axes by input and axis; True stands for the first axis of each
            input ("batch") and the second of token ids and masks ("sequence"), False for none.
        external: write weights to a second file even if protobuf could hold them.

    Returns:
        The written model, and its difference from torch.

    Raises:
        ConfigError: a format has no exact counterpart in ONNX; the message names the layer.
        DataError: the inputs cannot be exported.
        MissingDependency: onnxscript is not installed.
        ModelError: torch cannot export the model, or the outputs of onnxruntime differ.
    """
    require_one_of("form", form, FORMS)
    why = nearest(dtype, _TYPES)
    if dtype == "bfloat16":
        why = "; onnxruntime does not compute in bfloat16 on a CPU"
    require(dtype in _TYPES, "dtype", dtype, f"one of: {', '.join(_TYPES)}{why}")
    floats, kind = _TYPES[dtype]
    path = Path(output)
    copied, layers, between = standing_in(model, floats)
    batch = named(copied, inputs)
    batch = batch.in_type(floats)
    axes = axes_of(batch, dynamic)
    with store_for(path, layers) as store, inference(copied):
        flat = Flat(copied, batch)
        # Large constants lie in temporary files, which exist within the context.
        with trace(flat, batch, axes, path) as traced:
            graph = Graph.of(traced, store)
            became = write(graph, layers, between, form, int(kind))
            with staged(graph.to_model(), path, external=external) as temporary:
                checked(temporary)
                # In the form qdq, fused integer products would round float inputs (see
                # ``_ROUNDS``).
                integers = form != "qdq"
                difference = verify(
                    temporary, flat, batch, axes, floats, integers=integers
                )
    notes: tuple[str, ...] = ()
    if form == "qdq" and any(_integers_alone(layer) for layer in layers.values()):
        notes = (_ROUNDS,)
    exported = Exported(path, became, difference, notes)
    logger.info("%s: %s", path, str(exported).replace("\n", "; "))
    return exported


def _integers_alone(layer: QuantizedLayer) -> bool:
    """Return whether onnxruntime fuses the DequantizeLinear into MatMulNBits."""
    # Without a rounded input, MatMulNBits is the fusion that onnxruntime chooses.
    if layer.kind != "Linear" or layer.input is not None or layer.quantized is None:
        return False
    return isinstance(layer.quantized.spec.dtype, Integer)


@contextmanager
def store_for(
    path: Path, layers: Mapping[str, QuantizedLayer]
) -> Iterator[Store | None]:
    """Yield a store on disk for the weights of a large model; None for a small one."""
    # Codes take a byte each in memory.
    count = sum(
        layer.quantized.codes.numel()
        for layer in layers.values()
        if layer.quantized is not None
    )
    if count <= LARGE_MODEL:
        yield None
        return
    with closing(Store(path)) as store:
        yield store


def checked(path: Path) -> None:
    """Raise ModelError for a model that onnx.checker rejects."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # checker and shape inference raise unrelated types
        raise ModelError(
            f"the exported model does not pass onnx's check: {error}",
        ) from error
