"""Modules as torch knows them: shared, moved, cast, saved, and called in any way that the float
layer allows.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from quark_onnx.common.errors import DataError, ModelError
from quark_onnx.torch.calibration.block_stream import inference
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.torch_models import llama, logits, made, tokens

INT8 = LayerSpec(TensorSpec("int8"), TensorSpec("int8"))
CAST = LayerSpec(TensorSpec("bfloat16"))


def seen_by(model: Any, layer: Any, data: list[Any]) -> float:
    """The greatest magnitude that a layer of a float model reads."""
    found = list[Any]()
    hook = layer.register_forward_pre_hook(
        lambda module, args: found.append(args[0].abs().max())
    )
    with torch.no_grad():
        for batch in data:
            model(*batch) if isinstance(batch, list) else model(batch)
    hook.remove()
    return float(torch.stack(found).max())


def small(spec: LayerSpec = INT8) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    quantize_model(model, [torch.randn(4, 64)], TorchConfig(spec), progress=False)
    return model


@pytest.mark.parametrize("spec", [INT8, LayerSpec(TensorSpec("int8"))])
def test_a_shared_layer_is_quantized_in_all_places(spec: LayerSpec) -> None:
    shared, x = nn.Linear(8, 8), torch.randn(4, 8)
    model = nn.Sequential(shared, nn.Softplus(beta=0.1), shared)
    reach = seen_by(model, shared, [x])
    quantize_model(model, [x], TorchConfig(spec), progress=False)
    assert isinstance(model[0], QuantizedLayer) and model[0] is model[2]
    if spec.input is not None:
        assert model[0].input.scale.item() == pytest.approx(reach / 127.5, rel=1e-6)


class Blocks(nn.Module):
    """Blocks in some order, with something in front of some."""

    def __init__(
        self, order: tuple[int, ...], between: float = 0.0, shared: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4, bias=False)) for _ in range(2)]
        )
        if shared:
            self.layers[1][0] = self.layers[0][0]
        self.order, self.between = order, between

    def forward(self, x: Any) -> Any:
        for index in self.order:
            x = self.layers[index](x + self.between if self.between else x)
        return x


@pytest.mark.parametrize(
    "model",
    [Blocks((0, 0, 1)), Blocks((0, 1), between=9.0), Blocks((0, 1), shared=True)],
)
def test_scales_are_right_where_blocks_do_not_follow_each_other(model: Any) -> None:
    torch.manual_seed(0)
    for layer in model.layers:
        nn.init.normal_(layer[0].weight, std=3)
    data = [torch.randn(5, 4) for _ in range(2)]
    wanted = [seen_by(model, block[0], data) / 127.5 for block in model.layers]
    quantize_model(model, iter(data), TorchConfig(INT8), progress=False)
    assert [block[0].input.scale.item() for block in model.layers] == pytest.approx(
        wanted, rel=1e-6
    )


class Handing(nn.Module):
    """Blocks that pass on a value that the first block computes for a sample, as in T5."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, hidden_states: Any, bias: Any = None) -> Any:
            bias = hidden_states.sum(0, keepdim=True) if bias is None else bias
            return self.linear(hidden_states + bias), bias

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Block() for _ in range(3)])

    def forward(self, x: Any) -> Any:
        bias = None
        for block in self.layers:
            x, bias = block(hidden_states=x, bias=bias)
        return x


def test_what_the_first_block_hands_on_is_of_each_sample() -> None:
    torch.manual_seed(0)
    model, data = (
        Handing(),
        [torch.randn(3, 4), 50 * torch.randn(5, 4), torch.randn(3, 4)],
    )
    wanted = [seen_by(model, block.linear, data) / 127.5 for block in model.layers]
    quantize_model(model, data, TorchConfig(INT8), progress=False)
    assert [block.linear.input.scale.item() for block in model.layers] == pytest.approx(
        wanted, rel=1e-6
    )


def test_a_forward_of_another_library_stays() -> None:
    model, called = made(llama()), list[str]()
    block = model.model.layers[0]
    own = block.forward

    def forward(*args: Any, **named: Any) -> Any:
        called.append("here")
        return own(*args, **named)

    block.forward = forward
    quantize_model(
        model, tokens(), TorchConfig(INT8, exclude=("lm_head",)), progress=False
    )
    assert vars(block)["forward"] is forward and len(called) >= len(tokens())


def test_caches_that_a_batch_asks_for_change_no_scale() -> None:
    scales = []
    for more in ({}, {"use_cache": True}):
        model = made(llama())
        data = [{"input_ids": batch, **more} for batch in tokens()]
        quantize_model(
            model, data, TorchConfig(INT8, exclude=("lm_head",)), progress=False
        )
        scales.append(
            model.get_submodule("model.layers.1.self_attn.o_proj").input.scale.item()
        )
    assert scales[0] == scales[1]


def test_modes_come_back_module_by_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2)).train()
    model[2].eval()  # frozen, as one does
    with inference(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model] == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["int8", "fp8", "uint4_wo_32", "mxfp4", "nvfp4"])
def test_a_cast_changes_what_is_computed_with_and_no_code(
    name: str, dtype: Any
) -> None:
    model = small(scheme(name))
    before = {
        key: value.clone()
        for key, value in model.state_dict().items()
        if not key.endswith("bias")
    }
    weight = model[0].weight
    model.to(dtype)
    after = model.state_dict()
    for key, value in before.items():
        assert after[key].dtype == value.dtype and torch.equal(
            after[key].float(), value.float()
        ), key
    torch.testing.assert_close(
        model[0].weight,
        weight.to(dtype),
        rtol=2e-3 if dtype == torch.float16 else 8e-3,
        atol=0,
    )
    assert model(torch.randn(2, 64, dtype=dtype)).dtype == dtype


def test_codes_move_with_the_model() -> None:
    moved = small(scheme("uint4_wo_32")).to("meta")
    assert all(
        tensor.device.type == "meta"
        for tensor in (moved[0].quantized.codes, moved[0].quantized.scale)
    )


@pytest.mark.parametrize("name", ["int8", "fp8", "uint4_wo_32", "nvfp4"])
def test_the_state_holds_all_that_is_computed_with(name: str) -> None:
    first, second = small(scheme(name)), small(scheme(name))
    for layer in (first[0], first[2]):
        other = quantize(torch.randn(*layer.shape), layer.spec.weight)
        layer.quantized = other
    x = torch.randn(3, 64)
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x)) and torch.equal(
        copy.deepcopy(first)(x), second(x)
    )


@pytest.mark.parametrize(
    ("layer", "args", "named"),
    [
        (nn.Linear(8, 4), (), {"input": torch.ones(2, 8)}),
        (nn.ConvTranspose2d(4, 3, 3, stride=2), (torch.ones(1, 4, 5, 6), [12, 13]), {}),
        (
            nn.ConvTranspose2d(4, 3, 3, stride=2, dilation=2),
            (torch.ones(1, 4, 5, 6),),
            {"output_size": (1, 3, 13, 16)},
        ),
        (nn.EmbeddingBag(9, 4), (torch.arange(6),), {"offsets": torch.tensor([0, 4])}),
        (
            nn.EmbeddingBag(9, 4, mode="sum"),
            (torch.arange(6), torch.tensor([0, 4]), torch.rand(6)),
            {},
        ),
        (
            nn.Conv2d(4, 4, 3, padding="same", padding_mode="reflect"),
            (torch.rand(1, 4, 8, 8),),
            {},
        ),
        (
            nn.Conv2d(4, 4, (3, 5), padding=(1, 2), padding_mode="circular"),
            (torch.rand(1, 4, 8, 8),),
            {},
        ),
    ],
)
def test_layers_are_called_as_their_float_ones_are(
    layer: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    wanted = copy.deepcopy(layer)
    with torch.no_grad():
        wanted.weight.copy_(wanted.weight.bfloat16())
    model = nn.ModuleDict({"layer": layer})
    kinds = (("EmbeddingBag", CAST),)
    quantize_model(model, None, TorchConfig(CAST, types=kinds), progress=False)
    with torch.no_grad():
        assert torch.equal(model["layer"](*args, **named), wanted(*args, **named))


def test_inputs_given_by_name_are_measured() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            return self.layer(input=x)

    model, x = Named(), torch.randn(3, 8)
    quantize_model(model, [x], TorchConfig(INT8), progress=False)
    assert model.layer.input.scale.item() == pytest.approx(
        x.abs().max().item() / 127.5, rel=1e-6
    )


def test_what_cannot_be_quantized_is_said() -> None:
    model = small()
    with pytest.raises(ModelError, match="0 is quantized already"):
        quantize_model(model, [torch.randn(4, 64)], TorchConfig(INT8), progress=False)
    with pytest.raises(ModelError, match="a single Linear; put it into a module"):
        quantize_model(
            nn.Linear(2, 2),
            None,
            TorchConfig(LayerSpec(TensorSpec("int8"))),
            progress=False,
        )
    with pytest.raises(DataError, match="the calibration data is empty"):
        quantize_model(
            nn.Sequential(nn.Linear(2, 2)), [], TorchConfig(INT8), progress=False
        )


@pytest.mark.parametrize("name", ["int32", "uint32", "int16", "uint16"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_greatest_value_of_wide_integers_keeps_its_sign(
    name: str, symmetric: bool
) -> None:
    weight = torch.tensor([[1.0, -1.0, 0.5, -0.25]])
    found = quantize(weight, TensorSpec(name, symmetric=symmetric)).dequantize()
    torch.testing.assert_close(found, weight, rtol=1e-4, atol=1e-4)


def test_logits_of_padded_batches_of_many_lengths() -> None:
    model, whole = made(llama()), made(llama())
    data = []
    for length in (5, 9, 12):
        ids = torch.cat([tokens(1, length)[0], tokens(2, length)[1]])
        mask = torch.ones_like(ids)
        mask[1, : length // 2] = 0
        data.append({"input_ids": ids, "attention_mask": mask})
    found = _reach(whole, "model.layers.1.mlp.down_proj", data)
    quantize_model(
        model,
        (batch for batch in data),
        TorchConfig(INT8, exclude=("lm_head",)),
        progress=False,
    )
    assert model.get_submodule(
        "model.layers.1.mlp.down_proj"
    ).input.scale.item() == pytest.approx(max(found) / 127.5, rel=1e-5)
    assert torch.isfinite(logits(model, tokens()[0])).all()


def _reach(model: Any, name: str, data: list[Any]) -> list[float]:
    found = list[float]()
    hook = model.get_submodule(name).register_forward_pre_hook(
        lambda module, args: found.append(args[0].abs().max().item())
    )
    with torch.no_grad():
        for batch in data:
            model(**batch)
    hook.remove()
    return found
