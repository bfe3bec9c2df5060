"""quantize_module: quantize a PyTorch module to an ONNX model in one call."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrators.readers.open import CalibrationData
from quark_onnx.api import Config, quantize
from quark_onnx.common.errors import MissingDependency
from quark_onnx.common.extras import pip_install
from quark_onnx.job import Result

if TYPE_CHECKING:
    from torch import nn

    from quark_onnx.torch.calibration.block_stream import Sample

#: The first opset that torch's exporter writes; quantization raises the opset if a number format
#: needs a later one.
_OPSET = 18


def quantize_module(  # noqa: PLR0913
    module: nn.Module,
    example_inputs: Sample,
    data: CalibrationData,
    config: Config = "A8W8",
    output: str | Path | None = None,
    *,
    dynamic: bool | Mapping[str, Mapping[int, str]] = True,
    opset: int = _OPSET,
    **settings: Any,
) -> Result:
    """Export a PyTorch module to ONNX and quantize it.

    ``torch.onnx.export(dynamo=True)`` traces the module in evaluation mode. onnxruntime runs the
    float ONNX model on the example inputs. Its outputs must equal those of the module before
    quantization starts.

    Args:
        module: the float module; it is not changed. Weights of other float types are exported as
            float32.
        example_inputs: one batch of inputs: a tensor, a tuple of arguments, or a dict of keyword
            arguments.
        data: calibration data: a torch ``DataLoader`` or another iterable of such batches. Integers
            that follow the inputs in a batch, or have the key ``label`` or ``labels``, are labels:
            the report has the top-1 of both models on the held-out samples. Further values of a
            ``DataLoader`` are dropped. All kinds of data of ``quantize`` are accepted.
        config: as for ``quantize``.
        output: path of the quantized ONNX model; None only returns it.
        dynamic: names of dynamic axes by input and axis, as ``{"x": {0: "batch"}}``. True stands
            for the first axis of each input ("batch") and the second axis of token ids and masks
            ("sequence"), False for none.
        opset: opset of the float ONNX model, 18 or later.
        settings: further arguments of ``quantize``: executor, progress, external, resume, ranges,
            task, labels, verdict, isolate.

    Returns:
        The quantized model, its plan and its report. The inputs have the names of the parameters of
        ``module.forward``.

    Raises:
        MissingDependency: torch or onnxscript is not installed.
        QuarkError: the module cannot be exported, or as for ``quantize``.
    """
    # find_spec imports neither package; torch takes seconds.
    if (
        importlib.util.find_spec("torch") is None
        or importlib.util.find_spec("onnxscript") is None
    ):
        raise MissingDependency(
            f"quantize_module needs torch and onnxscript: {pip_install('torch')}",
        )
    from quark_onnx.torch.exports.onnx.float_module import exported

    with exported(module, example_inputs, data, dynamic=dynamic, opset=opset) as (
        model,
        samples,
    ):
        return quantize(model, samples, config, output, **settings)
