"""vLLM's own model of a checkpoint, on the CPU: its parameters, and what its loader writes into
them.

Kernels are neither looked for nor made: nothing is computed.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

_LAYERS = "vllm.model_executor.layers.quantization."
#: What makes vLLM import all schemes that are looked at here.
_LAYOUTS = (
    *("quark.quark", "compressed_tensors.compressed_tensors", "auto_awq", "fp8"),
    *(
        f"compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_{name}"
        for name in (
            *(
                "wna16",
                "w4a4_mxfp4",
                "w8a8_fp8",
                "w8a8_int8",
                "w8a8_mxfp8",
                "w4a4_nvfp4",
            ),
        )
    ),
)
#: How functions are called that look for kernels.
_CHOICES = ("init_", "choose_", "expose_", "check_", "verify_")
#: What vLLM makes for each layer, sets itself, and a checkpoint need not have.
_NEED_NOT_BE = (
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".prob_scale",
    "_zero_point",
    ".w13_weight_g_idx",
    ".w2_weight_g_idx",
)


def imported(name: str) -> Any:
    """A module of vLLM; the test is skipped, with the reason, where it cannot be imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(f"vllm.{name}", exc_type=ImportError)


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Context manager: vLLM's platform is the CPU, one process is all there are, and there are no
    kernels.
    """
    platforms, distributed = imported("platforms"), imported("distributed")
    cpu = imported("platforms.cpu").CpuPlatform()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(platforms, "_current_platform", cpu)
        for module in _modules():
            if hasattr(module, "current_platform"):
                patch.setattr(module, "current_platform", cpu)
            for name in [*vars(module)]:
                if name.startswith("select_"):
                    patch.setattr(
                        module, name, MagicMock(return_value=(MagicMock(), MagicMock()))
                    )
                elif name.startswith(_CHOICES):
                    patch.setattr(
                        module, name, MagicMock(return_value=MagicMock(__name__="none"))
                    )
        with _config():
            distributed.init_distributed_environment(
                1, 0, "tcp://127.0.0.1:0", 0, "gloo"
            )
            distributed.initialize_model_parallel(1, 1)
        try:
            yield
        finally:
            distributed.destroy_model_parallel()
            distributed.destroy_distributed_environment()


def _modules() -> list[ModuleType]:
    for name in _LAYOUTS:
        imported(f"model_executor.layers.quantization.{name}")
    return [
        module
        for name, module in sys.modules.items()
        if name.startswith(_LAYERS) and "utils" not in name
    ]


def _config(**settings: Any) -> Any:
    config = imported("config")
    return config.set_current_vllm_config(config.VllmConfig(**settings))


def built(folder: Path) -> Any:
    """vLLM's model of a checkpoint, without weights.

    Raises what vLLM raises where it refuses the configuration.
    """
    config, loader = imported("config"), imported("model_executor.model_loader.utils")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = config.ModelConfig(
            model=str(folder), dtype="bfloat16", skip_tokenizer_init=True
        )
        whole = config.VllmConfig(model_config=model)
        with config.set_current_vllm_config(whole):
            return loader.initialize_model(whole)


class _Writing(TorchFunctionMode):
    """Notes what is written into tensors with another shape, or in another type that does not hold
    it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.misread: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.copy_ and isinstance(args[1], torch.Tensor):
            into, source = args[:2]
            if into.shape != source.shape and into.numel() != source.numel():
                self.misread.append(
                    f"{list(source.shape)} is written into {list(into.shape)}"
                )
            if into.dtype != source.dtype and not torch.equal(
                source.to(into.dtype).to(source.dtype), source
            ):
                self.misread.append(f"{source.dtype} becomes {into.dtype}")
        return function(*args, **(kwargs or {}))


def prepare_cache(model: Any, folder: Path) -> None:
    """Make an fp8 cache of a model's scales of keys and values, as vLLM does behind its loader.

    Raises:
        AssertionError: they are none that vLLM takes.
    """
    methods = imported("model_executor.layers.quantization.kv_cache")
    attentions = [
        each
        for each in model.modules()
        if isinstance(getattr(each, "quant_method", None), methods.BaseKVCacheMethod)
    ]
    assert attentions
    for each in attentions:
        for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):
            if hasattr(each, name):
                getattr(each, name).data.fill_(-1.0)
    model.load_weights(
        (name, each)
        for file in folder.glob("*.safetensors")
        for name, each in load_file(file).items()
    )
    for each in attentions:
        each.kv_cache_dtype = "fp8"
        each.quant_method.process_weights_after_loading(each)


def load(model: Any, folder: Path, *, cached: bool = False) -> list[str]:
    """Load a checkpoint as vLLM does.

    What is wrong with it: tensors that change, parameters that stay as they were.

    Args:
        cached: whether it has scales of keys and values.

    Raises:
        Exception: what vLLM raises where it knows no parameter of a name, or not of this shape.
    """
    tensors = {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    watch, held = _Writing(), list[dict[str, Any]]()
    for again in (False, True):
        for parameter in model.parameters() if again else ():
            parameter.data.view(-1).view(torch.uint8).fill_(
                255
            )  # no number, which compressed-tensors takes for unset
        with watch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.load_weights(
                (name, tensor.clone()) for name, tensor in tensors.items()
            )
        held.append(
            {
                name: each.detach().view(-1).view(torch.uint8).clone()
                for name, each in model.named_parameters()
            }
        )
    empty = [
        name for name, first in held[0].items() if not torch.equal(first, held[1][name])
    ]
    wanted = [
        name
        for name in empty
        if not name.endswith(_NEED_NOT_BE)
        or (cached and name.endswith(("k_scale", "v_scale")))
    ]
    return [*dict.fromkeys(watch.misread), *(f"{name} stays empty" for name in wanted)]
