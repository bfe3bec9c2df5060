"""UNets and transformers of diffusers: calibrated on keyword arguments, written, and read again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.export.diffusion import load_diffusion_model, save_diffusion_model
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.in_memory import quantize_model

diffusers = pytest.importorskip("diffusers")
#: How much the output of a random model may be off, relative (L2).
LARGEST = {"fp8": 0.2, "int8": 0.1, "mxfp4": 0.7}


def unet() -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    ).eval()


def flux() -> Any:
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()


def prompts(model: Any, count: int = 3) -> Iterator[dict[str, Any]]:
    """Keyword arguments of steps of denoising, as a generator: they are read once."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    for step in range(count):
        if isinstance(model, diffusers.UNet2DConditionModel):
            yield {
                "sample": drawn(1, 4, 8, 8),
                "timestep": torch.tensor(10 * step),
                "encoder_hidden_states": drawn(1, 5, 32),
            }
        else:
            yield {
                "hidden_states": drawn(1, 16, 4),
                "encoder_hidden_states": drawn(1, 5, 32),
                "pooled_projections": drawn(1, 32),
                "timestep": torch.tensor([0.1 * step]),
                "img_ids": torch.zeros(16, 3),
                "txt_ids": torch.zeros(5, 3),
            }


def computed(model: Any) -> Any:
    with torch.no_grad():
        return model(**next(prompts(model, 1))).sample


@pytest.mark.parametrize("build", [unet, flux])
@pytest.mark.parametrize("name", LARGEST)
def test_round_trip(build: Any, name: str, tmp_path: Path) -> None:
    model = build()
    wanted = computed(model)
    edges = ("conv_in", "conv_out") if build is unet else ("x_embedder", "proj_out")
    config = TorchConfig(
        scheme(name),
        layers=(("*ff.net.2", scheme("int8")),),
        exclude=edges,
    )
    report = quantize_model(model, prompts(model), config, progress=False)
    assert set(edges) == set(report.kept)
    kinds = {type(each).__name__ for each in build().modules()}
    assert ("Conv2d" in kinds) == (build is unet)
    assert report.quantized and not report.notes
    found = computed(model)
    error = float((found - wanted).norm() / wanted.norm())
    assert 0 < error < LARGEST[name]
    own = [each for each in report.quantized if each.endswith("ff.net.2")]
    layer = model.get_submodule(own[0])
    assert layer.quantized.spec.dtype.name == "int8"
    save_diffusion_model(model, tmp_path / "out")
    loaded = load_diffusion_model(tmp_path / "out")
    assert type(loaded) is type(model)
    assert torch.equal(computed(loaded), found)
    layers = [each for each in loaded.modules() if isinstance(each, QuantizedLayer)]
    assert len(layers) == len(report.quantized)


def test_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Linear has no configuration of diffusers"):
        save_diffusion_model(torch.nn.Linear(4, 4), tmp_path / "out")
    with pytest.raises(ConfigError, match="no layer of the model is quantized"):
        save_diffusion_model(flux(), tmp_path / "other")
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModle"}')
    with pytest.raises(ModelError, match="did you mean 'FluxTransformer2DModel'"):
        load_diffusion_model(tmp_path)
