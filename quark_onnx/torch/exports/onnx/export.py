"""export_onnx: write a quantized PyTorch model as an ONNX model with the same codes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto

from quark_onnx.dtypes import Integer
from quark_onnx.errors import ConfigError, ModelError, nearest
from quark_onnx.graph import Graph, Store
from quark_onnx.graph.io import staged
from quark_onnx.graph.store import LARGE_MODEL
from quark_onnx.torch.calibration.block_stream import inference
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
#: What onnxruntime does by itself with weights of few bits behind a DequantizeLinear.
_ROUNDS = (
    "onnxruntime rounds to int8 what it multiplies such weights with, about 1 % of it,"
    " unless a session sets session.qdq_matmulnbits_accuracy_level to 1"
)


@dataclass(frozen=True)
class Exported:
    """An ONNX model that was written.

    Attributes:
        path: of the model; weights of a large one lie in ``<name>.data`` beside it.
        layers: what became of each quantized layer.
        difference: the largest relative difference (L2) between onnxruntime and torch at any
            output.
        notes: what a user should know.
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


def export_onnx(  # noqa: PLR0913
    model: Any,
    output: Path | str,
    inputs: Any,
    *,
    form: str = "auto",
    dtype: str = "float32",
    dynamic: bool | Axes = True,
    external: bool = False,
) -> Exported:
    """Write a quantized model as ONNX.

    Nothing is there before onnxruntime has computed what torch computes.

    Args:
        model: as ``quantize_model`` leaves it; it is not changed. A language model is written
            without its cache of keys and values.
        output: the file.
        inputs: what it is run on: a tensor, a dict of keywords or a list of arguments.
        form: how weights are written: "qdq" with DequantizeLinear alone; "auto" as onnxruntime's
            MatMulNBits where that holds their codes; "operators" refuses blocks that it does not
            hold.
        dtype: what is computed in, "float32" or "float16".
        dynamic: names of dynamic axes by input and axis; True stands for the first axis of each
            input ("batch") and the second of token ids and masks ("sequence"), False for none.
        external: write weights to a second file even if protobuf could hold them.

    Raises:
        ConfigError: a format has no exact counterpart in ONNX; the message names the layer.
        DataError: the inputs are none that can be exported.
        MissingDependency: onnxscript is not installed.
        ModelError: torch cannot export the model, or onnxruntime computes something else.
    """
    if form not in FORMS:
        raise ConfigError(f"form is {form!r}; it must be one of: {', '.join(FORMS)}")
    if dtype not in _TYPES:
        why = (
            "; onnxruntime does not compute in bfloat16 on a CPU"
            if dtype == "bfloat16"
            else nearest(dtype, _TYPES)
        )
        raise ConfigError(
            f"dtype is {dtype!r}; it must be one of: {', '.join(_TYPES)}{why}",
        )
    floats, kind = _TYPES[dtype]
    path = Path(output)
    copied, layers, between = standing_in(model, floats)
    batch = named(copied, inputs)
    batch = batch.in_type(floats)
    axes = axes_of(batch, dynamic)
    store = store_for(path, layers)
    try:
        with inference(copied):
            flat = Flat(copied, batch)
            with trace(flat, batch, axes, path) as traced:
                graph = Graph.of(traced, store)
                became = write(graph, layers, between, form, int(kind))
                with staged(graph.to_model(), path, external=external) as temporary:
                    checked(temporary)
                    difference = verify(
                        temporary,
                        flat,
                        batch,
                        axes,
                        floats,
                        integers=form != "qdq",
                    )
    finally:
        if store is not None:
            store.close()
    alone = form == "qdq" and any(_integers_alone(layer) for layer in layers.values())
    exported = Exported(path, became, difference, (_ROUNDS,) if alone else ())
    logger.info("%s: %s", path, str(exported).replace("\n", "; "))
    return exported


def _integers_alone(layer: QuantizedLayer) -> bool:
    """Whether onnxruntime makes a MatMulNBits of the layer's DequantizeLinear."""
    spec = None if layer.quantized is None else layer.quantized.spec
    return (
        layer.kind == "Linear"
        and layer.input is None
        and spec is not None
        and isinstance(spec.dtype, Integer)
    )


def store_for(path: Path, layers: Mapping[str, QuantizedLayer]) -> Store | None:
    """Return a place on disk for the weights of a large model; None for a small one."""
    count = sum(
        layer.quantized.codes.numel()
        for layer in layers.values()
        if layer.quantized is not None
    )
    return Store(path) if count > LARGE_MODEL else None


def checked(path: Path) -> None:
    """Raise ModelError for a model that does not pass onnx's check."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # checker and shape inference raise unrelated types
        raise ModelError(
            f"the exported model does not pass onnx's check: {error}",
        ) from error
