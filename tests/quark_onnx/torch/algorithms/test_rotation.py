"""Rotations of language models: what they compute stays, and each weight is what the papers say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.kernels.hadamard import balanced, random_hadamard
from quark_onnx.torch.algorithms.rotation.rotate import rotate
from quark_onnx.torch.algorithms.rotation.settings import Rotation
from quark_onnx.torch.algorithms.rotation.spinquant import cayley_step
from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader
from quark_onnx.torch.config.algorithm_order import algorithm
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.online_rotation import OnlineRotation, OrthogonalMatrix
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.models.structure import set_module
from quark_onnx.torch.pipelines.file_to_file import quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import chosen_layers, quantize_model
from quark_onnx.torch.quantization.config.algorithms import RotationConfig
from tests.torch_families import FAMILIES
from tests.torch_families import config_of as family
from tests.torch_models import llama, logits, made, saved, tokens

#: Families whose residual stream cannot be rotated, and why.
REFUSED = {
    "dbrx": "experts.mlp.w1 belongs to no layer",
    "gemma2": "post_attention_layernorm normalizes what model.layers.0.self_attn.o_proj computes",
    "gemma3": "post_attention_layernorm normalizes what model.layers.0.self_attn.o_proj computes",
    # whose router is no plain layer
    "llama4": "layers.0 computes something else when it is rotated",
    "grok1": "post_attn_norm normalizes what model.layers.0.attn.o_proj computes",
}
#: Families whose values of attention heads are not rotated: DBRX clamps them, and the code of the
#: others does not say how large a head is.
NO_HEADS = ("dbrx", "chatglm3", "qwen", "grok1")


def random_model(config: Any, **settings: Any) -> Any:
    """A model whose norms and biases matter."""
    model = made(config, **settings)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(
                    0.3
                    * torch.randn(parameter.shape, generator=generator).to(parameter)
                )
    return model


def error(before: Any, after: Any) -> float:
    return float((after - before).norm() / before.norm())


def state(model: Any) -> dict[str, Any]:
    return {
        name: tensor.detach().clone()
        for name, tensor in model.named_parameters(remove_duplicate=False)
    }


@pytest.mark.parametrize(
    ("shape", "axis", "size"),
    [((3, 24), -1, 12), ((40, 2), 0, 40), ((2, 28, 3), 1, 28)],
)
def test_torch_turns_as_numpy_does(
    shape: tuple[int, ...], axis: int, size: int
) -> None:
    rotation = random_hadamard(size, seed=3)
    x = np.random.default_rng(0).normal(size=shape)
    found = OrthogonalMatrix.of(rotation).turn(torch.from_numpy(x), axis)
    np.testing.assert_allclose(found.numpy(), rotation.turn(x, axis), atol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_computes_what_it_did(name: str) -> None:
    model = random_model(family(name))
    before, weights, batch = logits(model, tokens()[0]), state(model), tokens()[0]
    if name in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[name]):
            rotate(model, Rotation(), [batch])
        assert torch.equal(logits(model, batch), before)
        assert model.config.tie_word_embeddings == family(name).tie_word_embeddings
        return
    report = rotate(model, Rotation(), [batch])
    assert error(before, logits(model, batch)) < 1e-4
    assert len(report.heads) == (0 if name in NO_HEADS else 2) and not report.online
    assert any("no values of attention heads" in note for note in report.notes) == (
        name in NO_HEADS
    )
    table = model.get_input_embeddings().weight
    old = next(tensor for key, tensor in weights.items() if tensor.shape == table.shape)
    kind = (
        balanced
        if name in ("opt", "gptj", "gpt2", "phi", "cohere", "olmo")
        else random_hadamard
    )
    torch.testing.assert_close(
        table.double(),
        old.double() @ torch.from_numpy(kind(64, 0).matrix()),
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_and_online_rotations_need_no_stream(name: str) -> None:
    model = random_model(family(name))
    before, batch = logits(model, tokens()[0]), tokens()[0]
    report = rotate(model, Rotation(r1=False, r4=True), [batch])
    assert 0 < error(before, logits(model, batch)) < 1e-4
    assert len(report.heads) == (0 if name in NO_HEADS else 2)
    assert report.online and all(
        isinstance(model.get_submodule(each), OnlineRotation) for each in report.online
    )


def test_each_weight_is_what_the_papers_say() -> None:
    model = random_model(llama(tie_word_embeddings=True))
    old = {name: tensor.double().numpy() for name, tensor in state(model).items()}
    rotate(model, Rotation(r4=True, seed=4), tokens())
    stream, head = random_hadamard(64, 4).matrix(), random_hadamard(16, 4).matrix()
    inner = random_hadamard(96, 4).matrix()
    block = "model.layers.1"
    attention, mlp = f"{block}.self_attn", f"{block}.mlp"
    gain, second = (
        old[f"{block}.input_layernorm.weight"],
        old[f"{block}.post_attention_layernorm.weight"],
    )
    expected = {
        "model.embed_tokens.weight": old["model.embed_tokens.weight"] @ stream,
        "lm_head.weight": old["model.embed_tokens.weight"]
        * old["model.norm.weight"]
        @ stream,
        "model.norm.weight": np.ones(64),
        f"{block}.input_layernorm.weight": np.ones(64),
        f"{attention}.q_proj.weight": old[f"{attention}.q_proj.weight"] * gain @ stream,
        f"{attention}.v_proj.weight": np.kron(np.eye(2), head).T
        @ old[f"{attention}.v_proj.weight"]
        * gain
        @ stream,
        f"{attention}.o_proj.weight": stream.T
        @ old[f"{attention}.o_proj.weight"]
        @ np.kron(np.eye(4), head),
        f"{mlp}.gate_proj.weight": old[f"{mlp}.gate_proj.weight"] * second @ stream,
        f"{mlp}.down_proj.layer.weight": stream.T
        @ old[f"{mlp}.down_proj.weight"]
        @ inner,
    }
    expected[f"{attention}.v_proj.weight"] = (
        np.kron(np.eye(2), head).T @ (old[f"{attention}.v_proj.weight"] * gain) @ stream
    )
    found = dict(model.named_parameters())
    for name, weight in expected.items():
        np.testing.assert_allclose(
            found[name].detach().numpy(), weight, atol=2e-6, err_msg=name
        )
    assert model.config.tie_word_embeddings is False


def test_activations_with_an_outlier_are_rounded_better_once_they_are_rotated() -> None:
    tokenwise = TorchConfig(
        LayerSpec(input=TensorSpec("int8", per_channel=True, dynamic=True)),
        exclude=("lm_head",),
    )
    errors = dict[bool, float]()
    for rotated in (False, True):
        model = random_model(llama())
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 7] = (
                20  # large, and of little weight, as in trained models
            )
            for layer in model.modules():
                if isinstance(layer, nn.Linear) and layer.in_features == 64:
                    layer.weight[:, 7] *= 0.05
        before = logits(model, tokens()[0])
        if rotated:
            rotate(model, Rotation(), tokens())
        quantize_model(model, None, tokenwise, progress=False)
        errors[rotated] = error(before, logits(model, tokens()[0]))
    assert errors[True] < 0.5 * errors[False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_stay(dtype: Any) -> None:
    model = random_model(llama(), dtype=dtype)
    before = logits(model, tokens()[0])
    assert rotate(model, Rotation(r4=True)).error < 1e-5
    assert {each.dtype for each in model.parameters()} == {dtype}
    assert error(before, logits(model, tokens()[0])) < 0.05


def test_parts_of_a_stream_are_rotated_alone() -> None:
    model = random_model(llama())
    before = logits(model, tokens()[0])
    old = model.model.embed_tokens.weight.detach().double()
    rotate(model, Rotation(size=16), tokens())
    expected = old.reshape(-1, 4, 16) @ torch.from_numpy(
        random_hadamard(16, 0).matrix()
    )
    torch.testing.assert_close(
        model.model.embed_tokens.weight.double(),
        expected.reshape(-1, 64),
        rtol=0,
        atol=1e-6,
    )
    assert error(before, logits(model, tokens()[0])) < 1e-4
    with pytest.raises(
        ConfigError, match="size of rotation is 48, which does not divide 64 channels"
    ):
        rotate(random_model(llama()), Rotation(size=48), tokens())


def test_online_rotations_are_quantized_behind_and_not_exported(tmp_path: Path) -> None:
    model = random_model(llama())
    config = TorchConfig(
        scheme("mxfp4"),
        exclude=("lm_head", "*layers.1.mlp.down_proj"),
        algorithms=("rotation:r4=true",),
    )
    report = quantize_model(model, None, config, progress=False)
    assert (
        "model.layers.0.mlp.down_proj.layer" in report.quantized
        and "a model has no checkpoint" in report.notes[0]
    )
    assert report.kept["model.layers.1.mlp.down_proj"] == "excluded"
    down = model.model.layers[0].mlp.down_proj
    assert isinstance(down, OnlineRotation) and isinstance(down.layer, QuantizedLayer)
    with pytest.raises(
        ConfigError, match=r"each run rotates what model.layers.0.mlp.down_proj reads"
    ):
        write_checkpoint(model, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class ScaledByChannel(nn.Module):
    """A layer whose outputs have factors of their own."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.factors = nn.Parameter(torch.linspace(0.5, 2, 64))

    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.factors


def test_a_block_that_is_no_match_is_named_and_nothing_is_done() -> None:
    model = random_model(llama(tie_word_embeddings=True))
    set_module(model, "model.layers.1.mlp", ScaledByChannel(model.model.layers[1].mlp))
    before = state(model)
    with pytest.raises(
        ModelError, match=r"model\.layers\.1 computes something else when it is rotated"
    ):
        rotate(model, Rotation(), tokens())
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in state(model).items()
    )
    assert (
        model.lm_head.weight is model.model.embed_tokens.weight
        and model.config.tie_word_embeddings
    )


def test_a_gain_of_zero_cannot_be_folded_where_the_readers_have_no_bias() -> None:
    model = random_model(family("gptj"))
    with torch.no_grad():
        model.transformer.h[0].ln_1.weight[3] = 0
    with pytest.raises(ModelError, match=r"transformer\.h\.0 computes something else"):
        rotate(model, Rotation(), tokens())


def test_what_the_sample_does_not_reach_may_write_to_the_stream() -> None:
    model = random_model(llama())
    model.model.vision = nn.Linear(8, 64)
    with pytest.raises(ModelError, match=r"model\.vision is not run on the sample"):
        rotate(model, Rotation(), tokens())


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="no list of blocks"):
        rotate(nn.Sequential(nn.Linear(4, 4)), Rotation(), [torch.ones(1, 4)])


@pytest.mark.parametrize("name", ["llama3.2", "gpt2", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("kind", ["mxfp4_weight_only", "fp8"])
def test_memory_and_files_agree(name: str, kind: str, tmp_path: Path) -> None:
    model = random_model(family(name))
    source = saved(model, tmp_path / "source")
    config = TorchConfig(
        scheme(kind), exclude=("lm_head",), algorithms=(Rotation(seed=2),)
    )
    quantize_checkpoint(source, tokens(), config, tmp_path / "files", progress=False)
    before = logits(model, tokens()[0])
    quantize_model(model, tokens(), config, progress=False)
    write_checkpoint(model, config, tmp_path / "memory")
    after = logits(model, tokens()[0])
    assert 1e-3 < error(before, after) < 1
    for folder in ("memory", "files"):
        loaded = load_checkpoint(tmp_path / folder)
        assert error(after, logits(loaded, tokens()[0])) < 1e-4
        assert "lm_head.weight" in CheckpointReader(tmp_path / folder)
        assert not loaded.config.tie_word_embeddings
        first, last = (
            loaded.get_input_embeddings().weight,
            loaded.get_output_embeddings().weight,
        )
        assert not torch.equal(first, last)


@pytest.mark.parametrize("name", ["llama3", "llama3.2"])
@pytest.mark.parametrize(
    "algorithms",
    [("rotation:r2=false", "rotation:r1=false"), ("rotation:r1=false", "rotation")],
)
def test_files_are_rotated_by_one_after_the_other(
    name: str, algorithms: tuple[str, ...], tmp_path: Path
) -> None:
    """A single layer is quantized, so that all other weights show what has been rotated."""
    model, rotated = random_model(family(name)), random_model(family(name))
    source, before = saved(model, tmp_path / "source"), logits(model, tokens()[0])
    only = "model.layers.1.mlp.down_proj"
    spec = scheme("int8_per_channel")
    config = TorchConfig(LayerSpec(), layers=((only, spec),), algorithms=algorithms)
    report = quantize_checkpoint(source, None, config, tmp_path / "out", progress=False)
    quantize_model(model, None, config, progress=False)
    loaded = load_checkpoint(tmp_path / "out")
    assert list(report.quantized) == [only]
    assert error(logits(model, tokens()[0]), logits(loaded, tokens()[0])) < 1e-4
    assert not torch.equal(
        loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
    )
    for settings in config.algorithms:
        rotate(rotated, settings)
    assert error(before, logits(rotated, tokens()[0])) < 1e-4
    own, found = state(model), state(loaded)
    for key, tensor in state(rotated).items():
        if not key.startswith(only):
            torch.testing.assert_close(own[key], tensor, rtol=0, atol=1e-6)
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6)


def test_files_take_no_rotations_that_run_or_are_learned(tmp_path: Path) -> None:
    source = saved(random_model(llama()), tmp_path / "source")
    for settings, message in (
        (Rotation(r4=True), "no place for r4"),
        (Rotation(trained=True), "learned in memory"),
    ):
        config = TorchConfig(
            scheme("mxfp4"), exclude=("lm_head",), algorithms=(settings,)
        )
        with pytest.raises(ConfigError, match=message):
            quantize_checkpoint(
                source, tokens(), config, tmp_path / "out", progress=False
            )
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_cannot_be_rotated_leaves_nothing(tmp_path: Path) -> None:
    source = saved(random_model(family("gemma2")), tmp_path / "source")
    config = TorchConfig(
        scheme("mxfp4"), exclude=("lm_head",), algorithms=("rotation",)
    )
    with pytest.raises(ModelError, match="cannot be rotated"):
        quantize_checkpoint(source, None, config, tmp_path / "out", progress=False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("centered", [False, True])
def test_steps_stay_orthogonal_and_go_where_they_should(centered: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    made, ones = (
        balanced if centered else random_hadamard,
        torch.eye(16, dtype=torch.float64),
    )
    products = (
        OrthogonalMatrix.of(made(16, seed)).turn(
            OrthogonalMatrix.of(made(16, seed + 1)).turn(ones)
        )
        for seed in range(20)
    )
    wanted = next(
        each
        for each in products
        if torch.linalg.det(each) > 0 and float(each.trace()) < 8
    )
    matrix = torch.eye(16, dtype=torch.float64)
    for step in range(300):
        noise = 0.01 * torch.randn(16, 16, generator=generator, dtype=torch.float64)
        matrix, _ = cayley_step(
            matrix, wanted + noise, 0.1 * (1 - step / 300), centered
        )
    torch.testing.assert_close(
        matrix @ matrix.T, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-12
    )
    assert float((matrix * wanted).sum()) > 15.9
    if centered:
        torch.testing.assert_close(
            matrix.sum(0), torch.ones(16, dtype=torch.float64), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_learned_rotations_are_no_worse_and_the_same_each_time(name: str) -> None:
    def learned(settings: Rotation) -> tuple[Any, float, float]:
        model = random_model(family(name))
        before = logits(model, tokens()[0])
        config = TorchConfig(scheme("mxfp4"), exclude=("lm_head",))
        report = rotate(
            model, settings, tokens(8), chosen_layers(model, config)[0], progress=False
        )
        assert report.learned is not None and report.learned[1] <= report.learned[0]
        assert error(before, logits(model, tokens()[0])) < 1e-4
        quantize_model(model, tokens(8), config, progress=False)
        ids = torch.cat(tokens(8))
        loss = nn.functional.cross_entropy(
            logits(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )
        assert float(loss) == pytest.approx(report.learned[1], rel=1e-3)
        return model.get_input_embeddings().weight, *report.learned

    settings = Rotation(trained=True, steps=10, seed=1, r4=True)
    one, before, after = learned(settings)
    assert after < before
    assert torch.equal(one, learned(settings)[0])


def test_where_gptq_follows_rotations_are_learned_on_rounded_activations_alone() -> (
    None
):
    settings = Rotation(trained=True, steps=3)
    config = TorchConfig(
        scheme("mxfp4"), exclude=("lm_head",), algorithms=(settings, "gptq")
    )
    report = quantize_model(random_model(llama()), tokens(8), config, progress=False)
    model = random_model(llama())
    layers = chosen_layers(model, config)[0]
    alone = {
        name: (module, LayerSpec(input=spec.input))
        for name, (module, spec) in layers.items()
    }
    expected, other = (
        rotate(random_model(llama()), settings, tokens(8), each, progress=False).notes
        for each in (alone, layers)
    )
    assert tuple(report.notes) == expected != other


def test_learning_needs_data_and_layers() -> None:
    with pytest.raises(DataError, match="rotations are learned from data"):
        rotate(random_model(llama()), Rotation(trained=True), tokens())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r1": 1}, "r1 of rotation is 1; it must be true or false"),
        ({"seed": -1}, "seed of rotation is -1"),
        ({"size": 1}, "size of rotation is 1"),
        ({"steps": 0}, "steps of rotation is 0"),
        ({"r3": True}, "behind it, a rotation changes nothing"),
        ({"r1": False, "r2": False}, "neither of r1, r2 and r4"),
        ({"r1": False, "r2": False, "r4": True, "trained": True}, "both are off"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rotation(**settings)


def test_rotations_have_a_name_and_amd_quarks() -> None:
    assert algorithm("rotation:r4=true,seed=3") == Rotation(r4=True, seed=3)
    assert RotationConfig(r4=True, rotation_size=32).algorithm() == Rotation(
        r2=False, r4=True, size=32
    )
    assert RotationConfig(r2=True, trainable=True).algorithm() == Rotation(trained=True)
    with pytest.raises(ConfigError, match="costs nothing at runtime and runs in every"):
        RotationConfig(online_r1_rotation=True).algorithm()
