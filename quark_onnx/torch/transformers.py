"""Loading of AMD Quark's checkpoints in transformers without ``amd-quark``.

    import quark_onnx.torch.transformers
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="auto")

transformers has a quantizer for ``quant_method: quark``, which imports the package ``quark``.
Importing this module replaces that quantizer if the package is missing;
``register(replace=True)`` replaces it in any case.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils import is_quark_available  # type: ignore[attr-defined]
from transformers.utils.quantization_config import (
    QuantizationConfigMixin,
    QuantizationMethod,
)

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.checkpoints.export import tensors_of
from quark_onnx.torch.checkpoints.layouts.quark import QuarkLayout
from quark_onnx.torch.checkpoints.load import quantized_layers, read_layer
from quark_onnx.torch.checkpoints.meta_model import dtype_of
from quark_onnx.torch.checkpoints.parameter_sources import Sources, fill, missing_of
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.models.attention import reinstall_attention_hooks
from quark_onnx.torch.models.checkpoint_names import DiskNames
from quark_onnx.torch.models.experts import UNFUSED, unfuse_experts
from quark_onnx.torch.models.names import instances, within, within_any
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.models.structure import set_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "QuarkCheckpointConfig",
    "QuarkCheckpointQuantizer",
    "is_registered",
    "register",
    "unregister",
]

logger = logging.getLogger(__name__)

METHOD = "quark"
#: Tensors that belong to the attention module of a layer.
_OF_ATTENTION = r"\.prob_output_(scale|zero_point)$"


class QuarkCheckpointConfig(QuantizationConfigMixin):
    """Content of ``quantization_config`` of a checkpoint in AMD Quark's layout.

    Args:
        entries: the keys of the JSON object and their values.
    """

    def __init__(self, **entries: Any) -> None:
        self.quant_method = QuantizationMethod.QUARK
        # readers of config.json look up quant_method, which entries may lack
        self.entries = copy.deepcopy(entries) | {"quant_method": METHOD}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return copy.deepcopy(self.entries)


class QuarkCheckpointQuantizer(HfQuantizer):
    """Loader of checkpoints in AMD Quark's layout, called by transformers.

    Before transformers reads the weights, the layers to quantize are removed from the model, so
    that only float tensors are read. Afterwards the layers are inserted with their codes, as in
    ``load_checkpoint``. ``model.dequantize()`` replaces the layers by float layers, and
    ``model.save_pretrained`` writes the unchanged codes.

    Args:
        quantization_config: the configuration of the checkpoint.
        settings: arguments of ``HfQuantizer``.

    Raises:
        ConfigError: the quantization is not supported.
    """

    # transformers quantizes nothing by this method: see quark_onnx.torch.ModelQuantizer
    requires_calibration = True

    def __init__(
        self,
        quantization_config: QuarkCheckpointConfig,
        **settings: Any,
    ) -> None:
        super().__init__(quantization_config, **settings)
        # raises before the model is built
        self._config, self._layout = QuarkLayout.read(quantization_config.to_dict())
        self._sources: Sources | None = None
        self._layers = dict[str, LayerSpec]()
        self._waiting = dict[str, _Waiting]()
        self._floats = dict[str, Any]()
        self._stacked = dict[str, Any]()

    def _process_model_before_weight_loading(
        self,
        model: Any,
        checkpoint_files: Any = None,
        **_: Any,
    ) -> Any:
        with torch.device("cpu"):  # transformers has set "meta"
            # stacked experts by name, for ``_dequantize``
            fused = dict(model.named_modules())
            unfuse_experts(model)
            self._sources = Sources(
                CheckpointReader(_folder_of(checkpoint_files, model)), model
            )
            self._layers = quantized_layers(
                model, self._config, self._layout, self._sources
            )
        stacks = instances(model, UNFUSED)
        self._stacked = {name: fused[name] for name in stacks}
        # layers within a stack wait with the stack
        single = [name for name in self._layers if not within_any(name, stacks)]
        self._waiting = {
            name: _Waiting(model.get_submodule(name)) for name in (*stacks, *single)
        }
        for name, waiting in self._waiting.items():
            # transformers distributes what it sees over devices: the stand-in, not the float layer
            set_module(model, name, waiting)
        # The tensors of the removed layers would be reported as unexpected. Files of a base model
        # have no "model." in front of names, so that any prefix matches.
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        removed = {rf"(^|\.){re.escape(name)}\." for name in self._waiting}
        model._keys_to_ignore_on_load_unexpected = _Patterns(
            {*ignored, *removed, _OF_ATTENTION}
        )
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        sources, dtype = self._sources, dtype_of(model.config)
        assert sources is not None
        devices = dict[str, Any]()
        for name, waiting in self._waiting.items():
            # before ``release``, which drops the buffer that tells the device
            devices[name] = waiting.device
            module = waiting.release()
            _compute_buffers(module, model)
            set_module(model, name, module)
        for name, spec in self._layers.items():
            module = model.get_submodule(name)
            layer = read_layer(module, name, spec, sources, dtype, self._layout)
            self._floats[name] = module  # on the device "meta"
            # the bias, which is float
            fill(layer, name, sources)
            # a layer is within a stack of experts that waited as a whole, or waited itself
            owner = next(
                removed
                for removed in devices
                if within(name, removed) or name == removed
            )
            set_module(model, name, layer.to(devices[owner]))
        for name, waiting in self._waiting.items():
            module = model.get_submodule(name)
            fill(module, name, sources)
            if missing := missing_of(module):
                raise ModelError(f"the checkpoint has no tensor '{name}.{missing[0]}'")
            # after the move: the hook moves inputs to the device of the module
            waiting.hook_again(module.to(devices[name]))
        reinstall_attention_hooks(model)
        # free: a model keeps its quantizer as long as it lives
        self._sources, self._waiting = None, {}
        # quark_onnx.torch.export_safetensors asks for it
        model.quantized_by = self._config
        return model.eval()

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        """Replace each quantized layer by a float layer with the dequantized weight.

        Activations and attention inputs are no longer quantized. Experts become the stacked
        tensors of transformers again.
        """
        if isinstance(dtype, str):  # as save_pretrained leaves it in the configuration
            dtype = getattr(torch, dtype)
        # the dtype of the float parameters
        dtype = dtype or model.dtype
        for name, module in self._floats.items():
            layer = model.get_submodule(name)
            _fill_from(module, layer, dtype)
            set_module(model, name, module)
            _copy_hook(layer, module)
        self._floats = {}
        # after the layers, so that the weights of experts are floats
        for name, stacked in self._stacked.items():
            experts = model.get_submodule(name)
            for parameter_name, tensor in experts.stacked_parameters().items():
                parameter = nn.Parameter(tensor.detach(), requires_grad=False)
                setattr(stacked, parameter_name, parameter)
            set_module(model, name, stacked)
            _copy_hook(experts, stacked)
        self._stacked = {}
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        reinstall_attention_hooks(model)
        return model

    def is_serializable(self, **_: Any) -> bool:
        """Return True, since ``save_pretrained`` writes the checkpoint's codes."""
        return True

    def get_state_dict_and_metadata(
        self,
        model: PreTrainedModel,
        **_: Any,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the tensors of the checkpoint, by their names in files.

        Raises:
            ModelError: weights are offloaded to disk and cannot be saved.
        """
        names = DiskNames(model)
        tensors = dict[str, Any]()
        for name, tensor in tensors_of(model, self._layout):
            if tensor.is_meta:
                raise ModelError(
                    f"{name} is offloaded; load the model without offloading to save it",
                )
            # names in files may differ from those in memory
            tensors[self._layout.key(names(name))] = tensor
        # transformers would rename them once more
        cast(Any, model)._weight_conversions = []
        return tensors, {}

    @property
    def is_trainable(self) -> bool:
        """Return False, since codes have no gradients."""
        return False


class _Patterns(set[str]):
    """Set of regular expressions that also supports ``+`` with a list.

    Earlier releases of transformers add a list, later ones unite sets.
    """

    def __add__(self, others: list[str]) -> list[str]:
        return [*self, *others]


class _Waiting(nn.Module):
    """Placeholder for modules whose tensors transformers must not read.

    The buffer has the size of the module, so that transformers and accelerate distribute it over
    devices.

    Args:
        module: a module with parameters on the device "meta".
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = [module]  # in a list it is no submodule
        size = sum(parameter.numel() for parameter in module.parameters())
        # codes take a byte in memory, and the scales of small blocks an eighth of one
        buffer = torch.empty(size + size // 8, dtype=torch.uint8, device="meta")
        self.register_buffer("size", buffer, persistent=False)
        # transformers skips the initialization of parameters with this attribute
        for parameter in module.parameters():
            parameter._is_hf_initialized = True

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module.

        transformers initializes weights by the names of attributes.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            # past ``nn.Module.__getattr__``, which would look for the list in vain
            return getattr(self.__dict__["_module"][0], name)

    @property
    def device(self) -> Any:
        """Return the device on which the module computes."""
        hook = self.__dict__.get("_hf_hook")
        # accelerate keeps offloaded modules on "meta" or the CPU, and runs them elsewhere
        return self.size.device if hook is None else hook.execution_device

    def release(self) -> Any:
        """Return the module and free the buffer."""
        self.register_buffer("size", None)
        return self._module.pop()

    def hook_again(self, module: nn.Module) -> None:
        """Attach a hook of accelerate that moves inputs like the placeholder's hook."""
        _copy_hook(self, module)


def _compute_buffers(module: Any, model: Any) -> None:
    """Compute the buffers of a module on the device "meta".

    Checkpoints lack these buffers, and transformers did not initialize them.
    """
    owners = [
        owner
        for owner in module.modules()
        if any(tensor.is_meta for tensor in owner.buffers(recurse=False))
    ]
    for owner in owners:
        # a copy, as to_empty allocates parameters, too, which stay on "meta" in the module
        filled = copy.deepcopy(owner).to_empty(device="cpu", recurse=False)
        for parameter in filled.parameters():
            parameter._is_hf_initialized = True  # skips initialization of unused values
        with torch.no_grad():
            model._init_weights(filled)
        for name, tensor in filled.named_buffers(recurse=False):
            owner.register_buffer(
                name,
                tensor,
                # register_buffer would make every buffer persistent
                persistent=name not in owner._non_persistent_buffers_set,
            )


def _fill_from(module: Any, layer: QuantizedLayer, dtype: Any) -> None:
    """Set the float weight and bias of a module to those of a layer, dequantized."""
    # Conv1D of GPT-2 has its weight as (in, out)
    weight = layer.weight.t() if layer.origin == "Conv1D" else layer.weight
    for name, tensor in (("weight", weight), ("bias", layer.bias)):
        if tensor is not None:
            value = tensor.detach().to(dtype).contiguous()
            setattr(module, name, nn.Parameter(value, requires_grad=False))


def _copy_hook(layer: Any, module: Any) -> None:
    """Attach a layer's hook of accelerate to a replacement of the layer."""
    hook = layer.__dict__.get("_hf_hook")
    if hook is None:
        return
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    settings = {"io_same_device": hook.io_same_device, "skip_keys": hook.skip_keys}
    add_hook_to_module(
        module,
        # without offloading: the dequantized weight is in memory
        AlignDevicesHook(hook.execution_device, place_submodules=True, **settings),
    )


def _folder_of(files: Any, model: Any) -> Path:
    """Return the folder of a checkpoint.

    Raises:
        ModelError: the checkpoint has no safetensors files.
    """
    names = [str(file) for file in files or ()]
    if not names or not all(name.endswith(".safetensors") for name in names):
        raise ModelError(
            f"{model.config.name_or_path or 'the model'} is quantized by Quark, which"
            f" writes *.safetensors; found {', '.join(names) or 'no file'}",
        )
    # all files of a checkpoint are in one folder, also in the cache of the hub
    return Path(names[0]).parent


def _mappings() -> tuple[tuple[dict[str, Any], Any], ...]:
    """Return transformers' tables of configurations and quantizers.

    Each table comes with the class of this module.
    """
    return (
        (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, QuarkCheckpointConfig),
        (auto.AUTO_QUANTIZER_MAPPING, QuarkCheckpointQuantizer),
    )


# taken before ``register``, so that ``unregister`` restores what transformers had
_ORIGINAL: Mapping[int, Any] = {
    id(table): table.get(METHOD) for table, _ in _mappings()
}


def register(*, replace: bool | None = None) -> bool:
    """Replace transformers' quantizer for checkpoints of AMD Quark.

    Args:
        replace: whether to replace the quantizer even if amd-quark is installed. False and None
            leave the quantizer of an installed amd-quark.

    Returns:
        Whether this package loads checkpoints from now on.
    """
    # a second call after register(replace=True) keeps this package registered
    if is_quark_available() and not replace and not is_registered():
        logger.info(
            "amd-quark is installed and loads checkpoints; register(replace=True)"
            " replaces it",
        )
        return False
    for table, cls in _mappings():
        table[METHOD] = cls
    return True


def unregister() -> None:
    """Restore transformers' own quantizer."""
    for table, _ in _mappings():
        table[METHOD] = _ORIGINAL[id(table)]


def is_registered() -> bool:
    """Return whether transformers loads checkpoints of AMD Quark by this package."""
    return all(table.get(METHOD) is cls for table, cls in _mappings())


register()
