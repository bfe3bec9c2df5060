"""Models that accelerate has spread over devices: its hooks move what layers read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.torch_models import llama, logits, made, tokens

accelerate = pytest.importorskip("accelerate")
_PLACES = dict.fromkeys(
    ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"),
    "cpu",
)


def spread(places: dict[str, str], **settings: Any) -> Any:
    """A model with hooks on each part of it, as several devices need them."""
    places = places | {"model.rotary_emb": "cpu"}
    return accelerate.dispatch_model(
        made(llama()), places, main_device="cpu", force_hooks=True, **settings
    )


@pytest.mark.parametrize("name", ["int8", "uint4_wo_32"])
@pytest.mark.parametrize(
    "algorithms",
    [
        *(
            (),
            ("gptq",),
            ("awq", "gptaq"),
            ("rotation",),
            ("autosmoothquant", "autoround:steps=5"),
            ("hqq",),
        ),
        ("distill:steps=5,sequences=8",),
    ],
)
def test_hooks_change_nothing(name: str, algorithms: tuple[str, ...]) -> None:
    config = TorchConfig(scheme(name), exclude=("lm_head",), algorithms=algorithms)
    found = []
    for model in (made(llama()), spread(_PLACES)):
        quantize_model(model, tokens(4), config, progress=False)
        found.append(logits(model, tokens(1)[0]))
    assert torch.equal(*found)
    assert not torch.equal(found[0], logits(made(llama()), tokens(1)[0]))


def test_what_is_offloaded_is_named(tmp_path: Path) -> None:
    model = spread(_PLACES | {"model.layers.1": "disk"}, offload_dir=str(tmp_path))
    before = logits(model, tokens(1)[0])
    with pytest.raises(
        ModelError, match=r"^model\.layers\.1\..* holds no numbers: .* file to file"
    ):
        quantize_model(
            model,
            None,
            TorchConfig(scheme("uint4_wo_32"), exclude=("lm_head",)),
            progress=False,
        )
    assert torch.equal(logits(model, tokens(1)[0]), before)
