"""quantize_model: scales against what the data was, errors that name what is wrong, other layers
than Linear.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.torch.calibration.observers import ActivationObserver
from quark_onnx.torch.calibration.perplexity import perplexity, windows_of
from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.schemes import SCHEMES, scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import KVCache, TorchConfig
from quark_onnx.torch.formats.quantized_tensor import fake_quantize
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests import torch_families
from tests.torch_models import llama, logits, made, tokens

INT8 = LayerSpec(TensorSpec("int8"), TensorSpec("int8"))


def seen_by(model: Any, name: str, batches: list[Any]) -> np.ndarray:
    """All that a layer reads, by a hook."""
    found = list[Any]()
    hook = model.get_submodule(name).register_forward_pre_hook(
        lambda module, args: found.append(args[0].flatten())
    )
    with torch.no_grad():
        for batch in batches:
            model(batch)
    hook.remove()
    return torch.cat(found).numpy()


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
)
def test_scales_are_those_of_the_float_model(name: str) -> None:
    model, batches = made(llama()), tokens()
    x = seen_by(model, name, batches)
    quantize_model(
        model, batches, TorchConfig(INT8, exclude=("lm_head",)), progress=False
    )
    scale = model.get_submodule(name).input.scale
    assert scale.item() == pytest.approx(np.abs(x).max() / 127.5, rel=1e-6)


def test_large_activations_are_sampled_from_all_channels() -> None:
    """A tensor too large for a histogram has the scale of its two halves, which are not sampled."""
    spec = TensorSpec("int8", calibrator="percentile:percentile=99")  # type: ignore[call-arg]
    x = torch.randn(2048, 4096, generator=torch.Generator().manual_seed(0))
    x[:, 1::2] *= 10
    whole, halves = (
        ActivationObserver(spec, "x", "cpu"),
        ActivationObserver(spec, "x", "cpu"),
    )
    whole.observe(x)
    for half in x.chunk(2):
        halves.observe(half)
    found, wanted = whole.params(), halves.params()
    assert found is not None and wanted is not None
    assert float(found.scale) == pytest.approx(float(wanted.scale), rel=0.01)


def test_percentiles_and_least_errors_are_found_from_the_data() -> None:
    model, batches, name = made(llama()), tokens(), "model.layers.0.mlp.down_proj"
    x = seen_by(model, name, batches)
    spec = TensorSpec("int8", calibrator="percentile:percentile=99")  # type: ignore[call-arg]
    quantize_model(
        model,
        batches,
        TorchConfig(LayerSpec(input=spec), exclude=("lm_head",)),
        progress=False,
    )
    reach = model.get_submodule(name).input.scale.item() * 127.5
    beyond = [(np.abs(x) > reach * share).mean() for share in (1, 0.95)]
    assert beyond[0] <= 0.01 < beyond[1]
    model = made(llama())
    spec = TensorSpec("int4", calibrator="minmse")  # type: ignore[call-arg]
    quantize_model(
        model,
        batches,
        TorchConfig(LayerSpec(input=spec), exclude=("lm_head",)),
        progress=False,
    )
    layer, tensor = model.get_submodule(name), torch.from_numpy(x)

    def error(scale: float) -> float:
        from quark_onnx.torch.formats.affine import Params

        return float(
            (fake_quantize(tensor, spec, Params(torch.tensor(scale))) - tensor)
            .square()
            .sum()
        )

    shrunk = [
        error(float(np.abs(x).max()) / 7.5 * share) for share in np.linspace(0.3, 1, 71)
    ]
    assert error(layer.input.scale.item()) <= min(shrunk) * 1.02


def test_keys_and_values_have_scales_of_their_own() -> None:
    model = made(llama())
    config = TorchConfig(
        scheme("fp8"),
        exclude=("lm_head",),
        kv_cache=KVCache(TensorSpec("fp8e4m3"), least=0.001),
    )
    quantize_model(model, tokens(), config, progress=False)
    scales = [
        model.get_submodule(
            f"model.layers.{block}.self_attn.{side}_proj"
        ).output.scale.item()
        for block in range(2)
        for side in "kv"
    ]
    assert len(set(scales)) == 4 and min(scales) > 0.001
    assert model.get_submodule("model.layers.0.self_attn.q_proj").output is None
    raised = made(llama())
    quantize_model(
        raised,
        tokens(),
        config.with_(kv_cache=KVCache(TensorSpec("fp8e4m3"), least=1.0)),
        progress=False,
    )
    assert (
        raised.get_submodule("model.layers.0.self_attn.k_proj").output.scale.item()
        == 1.0
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_runs(name: str) -> None:
    model = made(llama(hidden_size=128, intermediate_size=160))
    before = logits(model, tokens()[0])
    quantize_model(
        model, tokens(), TorchConfig(scheme(name), exclude=("lm_head",)), progress=False
    )
    after = logits(model, tokens()[0])
    assert (
        torch.isfinite(after).all()
        and 0 < float((after - before).norm() / before.norm()) < 1.5
    )


class Picture(nn.Module):
    """Every kind of layer that is no Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(
            3, 8, 3, stride=2, padding=1, groups=1, padding_mode="reflect"
        )
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.table = nn.Embedding(10, 4, padding_idx=0)
        self.bag = nn.EmbeddingBag(10, 4, mode="mean")

    def forward(self, x: Any, index: Any) -> Any:
        y = self.up(torch.relu(self.deep(torch.relu(self.first(x)))))
        return y.mean((2, 3)) + self.table(index) + self.bag(index[:, None])


@pytest.mark.parametrize("per_channel", [False, True])
def test_convolutions_and_embeddings(per_channel: bool) -> None:
    torch.manual_seed(0)
    model = Picture().eval()
    data = [(torch.randn(2, 3, 8, 8), torch.tensor([1, 3])) for _ in range(3)]
    with torch.no_grad():
        before = model(*data[0])
    weights = {
        name: module.weight.detach().clone() for name, module in model.named_children()
    }
    spec = TensorSpec("int8", per_channel=per_channel)
    config = TorchConfig(
        LayerSpec(spec, TensorSpec("int8")),
        types=(("Embedding", LayerSpec(spec)), ("EmbeddingBag", LayerSpec(spec))),
    )
    report = quantize_model(model, data, config, progress=False)
    assert set(report.quantized) == {"first", "deep", "up", "table", "bag"}
    with torch.no_grad():
        after = model(*data[0])
    assert 0 < float((after - before).norm() / before.norm()) < 0.05
    for name, weight in weights.items():
        first = weight.transpose(0, 1) if name == "up" else weight
        reach = first.abs().flatten(1).amax(1) if per_channel else first.abs().amax()
        found = model.get_submodule(name).weight.detach()
        found = found.transpose(0, 1) if name == "up" else found
        reach = torch.where(reach > 0, reach, 127.5)  # the row of the padding
        step = (
            (reach / 127.5).reshape(-1, *[1] * (weight.ndim - 1))
            if per_channel
            else reach / 127.5
        )
        torch.testing.assert_close(
            found, (first / step).round().clamp(-128, 127) * step, rtol=1e-5, atol=1e-7
        )


def test_layers_of_their_own() -> None:
    config = TorchConfig(
        scheme("int8"),
        layers=(("*.0.mlp.*", scheme("mxfp4_weight_only")), ("*mlp*", LayerSpec())),
        exclude=("lm_head", "*q_proj"),
    )
    model = made(llama())
    report = quantize_model(model, tokens(), config, progress=False)
    assert report.quantized["model.layers.0.mlp.up_proj"] == scheme("mxfp4_weight_only")
    assert report.quantized["model.layers.1.self_attn.k_proj"] == scheme("int8")
    assert not any("1.mlp" in name or "q_proj" in name for name in report.quantized)
    assert isinstance(model.model.layers[1].mlp.up_proj, nn.Linear)
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantizedLayer)


@pytest.mark.parametrize(
    "config, message",
    [
        (TorchConfig(INT8, exclude=("lm_haed",)), r"exclude names 'lm_haed'.*lm_head"),
        (
            TorchConfig(INT8, layers=(("*.upproj", INT8),)),
            r"layers names '\*\.upproj'.*up_proj",
        ),
        (
            TorchConfig(INT8, kv_cache=KVCache(TensorSpec("int8"), ("*key",))),
            r"kv_cache names '\*key'",
        ),
    ],
)
def test_names_that_match_nothing_are_errors(config: TorchConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quantize_model(made(llama()), tokens(), config, progress=False)


def test_bad_data_is_named() -> None:
    config = TorchConfig(INT8, exclude=("lm_head",))
    with pytest.raises(DataError, match="no calibration data was given"):
        quantize_model(made(llama()), None, config)
    with pytest.raises(DataError, match="is empty"):
        quantize_model(made(llama()), [], config, progress=False)
    with pytest.raises(DataError, match="cannot be run on sample 1"):
        quantize_model(
            made(llama()),
            [tokens()[0], torch.tensor([[10**6]])],
            config,
            progress=False,
        )
    with pytest.raises(DataError, match=r"yields a int"):
        quantize_model(made(llama()), [3], config, progress=False)


def test_a_model_that_overflows_is_told_so() -> None:
    model = made(llama())
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.fill_(float("inf"))
    with pytest.raises(
        DataError,
        match=r"the input of model.layers.1.self_attn.q_proj is infinite or no number",
    ):
        quantize_model(
            model, tokens(), TorchConfig(INT8, exclude=("lm_head",)), progress=False
        )


def test_a_model_is_left_as_it_was_where_it_fails() -> None:
    model = made(llama())
    before = logits(model, tokens()[0])
    with pytest.raises(DataError):
        quantize_model(
            model,
            [torch.tensor([[10**6]])],
            TorchConfig(INT8, exclude=("lm_head",)),
            progress=False,
        )
    assert torch.equal(logits(model, tokens()[0]), before) and model.config.use_cache


@pytest.mark.parametrize("algorithms", [(), ("awq", "gptq"), ("autoround:steps=2",)])
def test_blocks_that_were_done_are_float_again_where_a_later_one_fails(
    algorithms: tuple[str, ...],
) -> None:
    model, data = made(llama(num_hidden_layers=3)), tokens()
    weight = model.model.layers[2].mlp.up_proj.weight
    kept = weight[0, 0].item()
    before = logits(model, data[0])
    with torch.no_grad():
        weight[0, 0] = float("nan")
    with pytest.raises((DataError, ModelError), match=r"layers\.2"):
        quantize_model(
            model,
            data,
            TorchConfig(INT8, exclude=("lm_head",), algorithms=algorithms),
            progress=False,
        )
    with torch.no_grad():
        weight[0, 0] = kept
    assert not any(isinstance(module, QuantizedLayer) for module in model.modules())
    assert torch.allclose(logits(model, data[0]), before, atol=1e-4)


def test_nothing_is_rotated_where_data_is_missing() -> None:
    model = made(llama())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(DataError, match="no calibration data was given"):
        quantize_model(
            model,
            None,
            TorchConfig(INT8, exclude=("lm_head",), algorithms="rotation"),
            progress=False,
        )
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "algorithms", [(), ("gptq",), ("awq",), ("autoround:steps=2",)]
)
def test_nothing_is_learned_from_padding(
    side: str, algorithms: tuple[str, ...]
) -> None:
    """Samples of three lengths in one batch, and each alone."""
    alone = [{"input_ids": torch.cat(tokens(1, size), 1)} for size in (5, 12, 8)]
    padded: dict[str, list[Any]] = {"input_ids": [], "attention_mask": []}
    for each in alone:
        ids = each["input_ids"]
        filled, mask = (torch.full((1, 12 - ids.shape[1]), value) for value in (3, 0))
        for key, parts in (
            ("input_ids", (filled, ids)),
            ("attention_mask", (mask, torch.ones_like(ids))),
        ):
            padded[key].append(torch.cat(parts if side == "left" else parts[::-1], 1))
    config = TorchConfig(INT8, exclude=("lm_head",), algorithms=algorithms)
    models = []
    for data in (alone, [{key: torch.cat(parts) for key, parts in padded.items()}]):
        models.append(made(llama()))
        quantize_model(models[-1], data, config, progress=False)
    wanted, found = (model.state_dict() for model in models)
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


class Residual(nn.Module):
    """A block that adds to what it reads, in place or not."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.up, self.down, self._inplace = (
            nn.Linear(32, 32),
            nn.Linear(32, 32),
            inplace,
        )

    def forward(self, x: Any) -> Any:
        found = self.down(torch.relu(self.up(x)))
        if self._inplace:
            x += found
            return x
        return x + found


@pytest.mark.parametrize("algorithms", [(), ("gptq",), ("gptaq",), ("awq",)])
def test_blocks_that_change_what_they_read(algorithms: tuple[str, ...]) -> None:
    spec, found = LayerSpec(TensorSpec("int4", block_size=32), TensorSpec("int8")), []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = nn.Module()
        model.layers = nn.ModuleList(Residual(inplace) for _ in range(3))
        model.forward = nn.Sequential(*model.layers).forward
        data = [torch.randn(1, 8, 32) for _ in range(3)]
        quantize_model(
            model, data, TorchConfig(spec, algorithms=algorithms), progress=False
        )
        found.append(model.state_dict())
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_blocks_that_return_tuples_are_walked() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, hidden: Any, mask: Any, kept: Any = None) -> tuple[Any, Any]:
            return hidden + torch.relu(self.inner(hidden)) * mask, kept

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Any) -> Any:
            for block in self.layers:
                x, _ = block(x, 0.5, kept=None)
            return x

    torch.manual_seed(0)
    model, batches = Model(), [torch.randn(2, 4, 8) for _ in range(3)]
    x = seen_by(model, "layers.2.inner", batches)
    quantize_model(model, batches, TorchConfig(INT8), progress=False)
    assert model.layers[2].inner.input.scale.item() == pytest.approx(
        np.abs(x).max() / 127.5, rel=1e-6
    )


def test_perplexity_is_that_of_its_definition() -> None:
    model, rows = made(llama()), torch.cat(tokens(5))
    with torch.no_grad():
        chances = (
            model(rows)
            .logits.double()
            .log_softmax(-1)[:, :-1]
            .gather(2, rows[:, 1:, None])
        )
    assert perplexity(model, list(rows), batch=2) == pytest.approx(
        float(torch.exp(-chances.mean())), rel=1e-6
    )
    assert [len(window) for window in windows_of(rows, 7)] == [7] * 8
    with pytest.raises(DataError, match="at least two tokens"):
        perplexity(model, [])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_weights_that_stay_float_are_read_again(kind: str, tmp_path: Path) -> None:
    model = made(torch_families.config_of("gpt2") if kind == "gpt2" else llama())
    config = TorchConfig(LayerSpec(input=TensorSpec("int8")), exclude=("lm_head",))
    quantize_model(model, tokens(), config, progress=False)
    write_checkpoint(model, config, tmp_path / "out")
    assert torch.equal(
        logits(load_checkpoint(tmp_path / "out"), tokens()[0]),
        logits(model, tokens()[0]),
    )
