"""Load a checkpoint in AMD Quark's layout, ours or its own, for evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quark_onnx.errors import ModelError
from quark_onnx.torch import quark_json
from quark_onnx.torch.affine import Params
from quark_onnx.torch.checkpoint import Reader, read_json
from quark_onnx.torch.checkpoint_layout import restored
from quark_onnx.torch.formats import TwoLevel
from quark_onnx.torch.layers import QuantizedLayer, kind_of, outputs_first
from quark_onnx.torch.skeleton import config_of, dtype_of, skeleton_of
from quark_onnx.torch.sources import Sources, fill, missing_of
from quark_onnx.torch.spec import LayerSpec, TensorSpec
from quark_onnx.torch.structure import layers_of, set_module

#: The ends of the names of a quantized layer's tensors.
_PARTS = ("weight", "weight_scale", "weight_zero_point", "weight_scale_2")


def load_checkpoint(folder: Path | str, *, dtype: Any = None, trust_code: bool = False) -> Any:
    """The model of a checkpoint, its quantized layers with their codes; float checkpoints load, too.

    Args:
        folder: a Hugging Face folder with safetensors.
        dtype: of what is computed; that of the checkpoint if None.
        trust_code: run Python files that the checkpoint brings along.

    Raises:
        ModelError: a file or a tensor is missing or damaged, or does not fit.
        ConfigError: it is quantized in a way that cannot be read.
    """
    folder = Path(folder)
    found = read_json(folder / "config.json").get("quantization_config")
    quantized, method = (None, "reorder") if found is None else quark_json.from_json(found)
    config, reader = config_of(folder, trust_code=trust_code), Reader(folder)
    kept = dtype_of(config) if dtype is None else dtype
    model = skeleton_of(config, trust_code=trust_code)
    sources = Sources(reader, model)
    for name, (module, kind) in layers_of(model).items() if quantized else ():
        spec = quantized.spec_of(name, kind) if quantized else None
        plain = spec is not None and (spec.weight is None or spec.weight.is_cast)
        if spec is not None and (plain or f"{name}.weight_scale" in sources):
            set_module(model, name, _layer(module, name, spec, sources, kept, method))
    fill(model, "", sources, dtype=dtype)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    if missing := missing_of(model):
        raise ModelError(f"the checkpoint {folder} has no tensor {missing[0]!r} ({len(missing)} are missing)")
    return model.eval()


def _layer(module: Any, name: str, spec: LayerSpec, sources: Sources, dtype: Any, method: str) -> QuantizedLayer:
    weight = None
    if spec.weight is not None:
        parts = {part: sources.get(f"{name}.{part}") for part in _PARTS if f"{name}.{part}" in sources}
        try:
            shape = tuple(outputs_first(module.weight, kind_of(module)).shape)
            weight = restored(parts, spec.weight, shape, dtype, method)
            weight.dequantize()
        except (RuntimeError, IndexError, ModelError) as error:
            raise ModelError(f"the tensors of {name} do not fit a weight of {spec.weight}: {error}") from error
    else:
        fill(module, name, sources)
    read, computed = (
        _scale(name, side, each, sources) for side, each in (("input", spec.input), ("output", spec.output))
    )
    return QuantizedLayer(module, weight, spec, read, computed)


def _scale(name: str, side: str, spec: TensorSpec | None, sources: Sources) -> Params | None:
    """The scale of an activation; None where each run computes it."""
    if spec is None or not spec.measured:
        return None
    key = f"{name}.{side}_scale" + "_2" * isinstance(spec.dtype, TwoLevel)
    if key not in sources:
        raise ModelError(f"the checkpoint has no tensor {key!r}, although the scale of the {side} is not dynamic")
    zero = f"{name}.{side}_zero_point"
    found = sources.get(zero).float() if zero in sources else None
    return Params(sources.get(key).reshape(()), None if found is None or not bool(found.any()) else found.reshape(()))
