"""Quantized UNets and transformers of diffusers as folders: save_diffusion_model and the way back.

A model is quantized by ``quantize_model``, as any module. The folder has what ``save_params``
writes, and the configuration of diffusers, from which the class is made again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quark_onnx.errors import MissingDependency, ModelError, nearest
from quark_onnx.torch.checkpoints.safetensors_io import check_free, read_json
from quark_onnx.torch.export.params import load_params, save_params

#: What ``save_params`` calls the files, and the file of diffusers' own configuration.
_NAME, _CONFIG = "model", "config.json"


def save_diffusion_model(model: Any, folder: Path | str) -> None:
    """Write a quantized model of diffusers.

    Args:
        model: quantized, with a ``config`` of diffusers.
        folder: may exist only if it is empty.

    Raises:
        ConfigError: the folder is taken, no layer is quantized, or a format has no place in AMD
            Quark's layout.
        ModelError: the model is none of diffusers.
    """
    folder = Path(folder)
    check_free(folder)
    if not hasattr(model, "save_config"):
        raise ModelError(
            f"a {type(model).__name__} has no configuration of diffusers; write it with"
            " save_params",
        )
    save_params(model, _NAME, export_dir=folder)
    model.save_config(folder)


def load_diffusion_model(folder: Path | str) -> Any:
    """The quantized model that ``save_diffusion_model`` has written.

    Raises:
        MissingDependency: diffusers is not installed.
        ModelError: a file is missing or damaged, or diffusers has no class of this name.
    """
    try:
        import diffusers
    except ImportError as error:
        raise MissingDependency(
            "diffusers is not installed; pip install diffusers",
        ) from error
    folder = Path(folder)
    content = read_json(folder / _CONFIG)
    name = str(content.get("_class_name"))
    kind: Any = getattr(diffusers, name, None)
    if not hasattr(kind, "from_config"):
        raise ModelError(
            f"{folder / _CONFIG} names the class {name!r}, which diffusers"
            f" lacks{nearest(name, dir(diffusers))}",
        )
    model = kind.from_config(content)
    return load_params(
        model,
        folder / f"{_NAME}.json",
        folder / f"{_NAME}.safetensors",
    )
