"""save_diffusion_model and load_diffusion_model: quantized models of diffusers.

UNets and transformers are quantized by ``quantize_model``. The folder has the files of
``save_params``, and the configuration of diffusers with the name of the class.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_onnx.common.errors import MissingDependency, ModelError, nearest
from quark_onnx.torch.checkpoints.safetensors_io import read_json
from quark_onnx.torch.quantization.params import load_params, save_params
from quark_onnx.torch.runtime.checkpoint_folder import check_free

if TYPE_CHECKING:
    from diffusers import ModelMixin

#: Base name of the files of ``save_params``, and the file of diffusers' configuration.
_NAME, _CONFIG = "model", "config.json"


def save_diffusion_model(model: ModelMixin, folder: Path | str) -> None:
    """Write a quantized model of diffusers.

    Args:
        model: a quantized model with a ``config`` of diffusers.
        folder: the folder; may exist only if it is empty.

    Raises:
        ConfigError: the folder is not empty, no layer is quantized, or AMD Quark's layout does not
            support a format.
        ModelError: the model is no model of diffusers.
    """
    folder = Path(folder)
    # Before anything is written, so that an error leaves no half of a model.
    check_free(folder)
    if not hasattr(model, "save_config"):
        raise ModelError(
            f"a {type(model).__name__} has no configuration of diffusers; write it with"
            " save_params",
        )
    save_params(model, _NAME, export_dir=folder)
    model.save_config(folder)


def load_diffusion_model(folder: Path | str) -> Any:
    """Load a quantized model from a folder of ``save_diffusion_model``.

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
    # ``save_config`` of diffusers writes the name of the class into the file.
    content = read_json(folder / _CONFIG)
    name = str(content.get("_class_name"))
    kind: Any = getattr(diffusers, name, None)
    # Also a name of diffusers that is no model, such as a function.
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
