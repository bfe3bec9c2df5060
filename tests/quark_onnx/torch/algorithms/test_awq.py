"""AWQ and Clip: scales and ranges against searches written anew, and real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch.algorithms.base import BlockJob
from quark_onnx.torch.algorithms.rescaling import activation_stats
from quark_onnx.torch.algorithms.rescaling.awq import AWQ
from quark_onnx.torch.algorithms.rescaling.clip import Clip
from quark_onnx.torch.algorithms.weight_rounding.range_search import SHARES, fitted
from quark_onnx.torch.calibration.perplexity import perplexity
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.quantized_tensor import Quantized, quantize
from quark_onnx.torch.pipelines.block import choose_codes
from quark_onnx.torch.pipelines.file_to_file import quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests import torch_families
from tests.quark_onnx.torch.algorithms.blocks import change, inputs_of, job_of, model_of
from tests.torch_models import data_folder, llama, logits, made, saved, tokens

UINT4 = scheme("uint4_wo_32")


def uneven(spec: LayerSpec = UINT4) -> BlockJob:
    """A block that reads channels of very different sizes."""
    model = model_of("llama3")
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("layernorm.weight"):
            parameter.data = torch.exp(
                1.5 * torch.randn(parameter.shape, generator=generator)
            )
        elif "layers" in name and parameter.ndim > 1:
            parameter.data.mul_(0.3)
    return job_of(model, spec)


def share(x: Any, weight: Any, left: Any) -> float:
    """The squared error of what a layer computes, as a share of it; float64."""
    exact = x @ weight.double().t()
    return float((x @ left.double().t() - exact).square().sum() / exact.square().sum())


@pytest.mark.parametrize("family", torch_families.FAMILIES)
def test_families_compute_what_they_did(family: str) -> None:
    job = job_of(model_of(family), UINT4)
    outcomes: list[Any] = []
    assert change(job, lambda: outcomes.extend(AWQ(steps=4)(job))) < 1e-4
    assert outcomes and not any(each.note for each in outcomes)
    assert any(each.after < each.before for each in outcomes)


@pytest.mark.parametrize("products", [2048, 8], ids=["products", "tokens"])
def test_the_best_power_against_a_search_written_anew(
    products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_stats, "PRODUCT_INPUTS", products)
    job = uneven()
    x = inputs_of(job, "mlp.up_proj")
    names = [f"{job.name}.mlp.{name}_proj" for name in ("gate", "up")]
    weights = [job.layers[name][0].weight.detach().double().clone() for name in names]
    gain = job.block.post_attention_layernorm.weight.detach().double().clone()
    size = x.abs().mean(0)
    spec = UINT4.weight
    assert spec is not None

    def errors(power: float) -> list[float]:
        scale = size**power
        scale = scale / scale.log().mean().exp()
        lefts = [
            quantize((weight * scale).float(), spec).dequantize().double() / scale
            for weight in weights
        ]
        return [
            float((x @ (left - weight).t()).square().sum())
            for left, weight in zip(lefts, weights, strict=True)
        ]

    found = [sum(errors(step / 20)) for step in range(21)]
    best = int(np.argmin(found)) / 20
    assert 0 < best < 1
    outcomes = {each.layer: each for each in AWQ()(job)}
    scale = gain / job.block.post_attention_layernorm.weight.double()
    torch.testing.assert_close(
        scale, size**best / (size**best).log().mean().exp(), rtol=1e-4, atol=0
    )
    for index, name in enumerate(names):
        power = float((x @ weights[index].t()).square().sum())
        assert outcomes[name].before == pytest.approx(
            errors(0)[index] / power, rel=1e-3
        )
        assert outcomes[name].after == pytest.approx(
            errors(best)[index] / power, rel=1e-3
        )
    torch.testing.assert_close(
        job.layers[names[0]][0].weight.double(),
        weights[0] * scale,
        rtol=1e-4,
        atol=1e-6,
    )


def test_what_is_promised_is_what_the_rewritten_block_gives() -> None:
    job = uneven()
    outcomes = AWQ(duo=True)(job)
    plain, _ = choose_codes(job, [])
    for each in outcomes:
        if each.layer.endswith(("v_proj", "up_proj")):
            continue  # their rows have been rescaled since, and weigh otherwise
        x = inputs_of(job, job.local(each.layer))
        weight = job.layers[each.layer][0].weight.detach()
        assert share(x, weight, plain[each.layer].dequantize()) == pytest.approx(
            each.after, rel=2e-3
        )
        assert each.after <= each.before * 1.05


@pytest.mark.parametrize(
    "name",
    ["mxfp4_weight_only", "nvfp4", "int4_wo_per_channel", "ptpc_fp8", "uint2_wo_32"],
)
def test_any_format(name: str) -> None:
    spec = scheme(name)
    job = uneven(LayerSpec(spec.weight))
    total = [0.0, 0.0]
    for each in AWQ()(job):
        total[0], total[1] = total[0] + each.before, total[1] + each.after
    assert 0 < total[1] < total[0]


@pytest.mark.parametrize("dtype", ["int4", "uint4", "fp8e4m3"])
def test_ranges_against_a_search_written_anew(dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    spec = TensorSpec(dtype, symmetric=dtype != "uint4", block_size=16)
    weight, x = (
        torch.randn(6, 40, generator=generator),
        torch.randn(50, 40, generator=generator),
    )
    weight[0, 0] = 8.0
    gram = x.t() @ x
    shares = (1.0, 0.8, 0.6, 0.4)
    found = fitted(weight, quantize(weight, spec), gram, shares, apart=True)
    off = (found.dequantize() - weight).double()
    for row in range(6):
        for start in (0, 16, 32):
            part = weight[row : row + 1, start : start + 16]
            ends = [(a, a) for a in shares]
            if dtype == "uint4":
                ends += [(a, b) for a in shares for b in shares]
            inside = gram[start : start + 16, start : start + 16].double()
            each = [
                float(
                    (d := narrowed(part, spec, *pair) - part.double()) @ inside @ d.t()
                )
                for pair in ends
            ]
            mine = off[row : row + 1, start : start + 16]
            got = float(mine @ inside @ mine.t())
            # the ends are searched one by one, so that the best pair of them may be missed
            assert (
                got <= min(each[: len(shares)]) * 1.0001 and got >= min(each) * 0.9999
            )


def test_the_shares_beside_the_whole_range_are_tried() -> None:
    weight, power = (
        torch.randn(32, 64, generator=torch.Generator().manual_seed(0)),
        torch.ones(64),
    )
    start = quantize(weight, TensorSpec("fp8e4m3", per_channel=True))

    def errors(*shares: float) -> Any:
        return (
            (fitted(weight, start, power, shares).dequantize() - weight).square().sum(1)
        )

    least = torch.stack([errors(1.0, share) for share in SHARES[1:3]]).amin(0)
    assert bool((errors(*SHARES[:3]) <= least * 1.0001).all())


def narrowed(part: Any, spec: TensorSpec, low: float, high: float) -> Any:
    """A group rounded with a narrower range.

    Steps are counted in float32, where the ends are exact halves.
    """
    lo, hi = min(float(part.min()), 0.0) * low, max(float(part.max()), 0.0) * high
    if spec.dtype.name == "fp8e4m3":
        scale = np.float32(max(-lo, hi) / 448)
        return (part / float(scale)).clamp(-448, 448).to(
            torch.float8_e4m3fn
        ).double() * float(scale)
    if spec.dtype.name == "int4":
        scale = np.float32(max(-lo, hi) / 7.5)
        return (part / float(scale)).round().clamp(-8, 7).double() * float(scale)
    scale = np.float32((hi - lo) / 15)
    zero = np.clip(-np.round(lo / float(scale)), 0, 15)
    return (
        (part / float(scale)).round().add(zero).clamp(0, 15) - zero
    ).double() * float(scale)


@pytest.mark.parametrize(
    "name", ["uint4_wo_32", "int4_wo_per_channel", "uint2_wo_32", "ptpc_fp8"]
)
def test_clip_makes_no_row_worse(name: str) -> None:
    spec = LayerSpec(scheme(name).weight)
    job = uneven(spec)
    plain, _ = choose_codes(job, [])
    found, outcomes = choose_codes(job, [Clip()])
    assert [each.layer for each in outcomes] != [] and not any(
        each.note for each in outcomes
    )
    for each in outcomes:
        x, weight = (
            inputs_of(job, job.local(each.layer)),
            job.layers[each.layer][0].weight.detach(),
        )
        rows = [row_errors(x, weight, codes[each.layer]) for codes in (plain, found)]
        assert (rows[1] <= rows[0] * 1.001).all()
        assert each.before == pytest.approx(
            share(x, weight, plain[each.layer].dequantize()), rel=1e-3
        )
        assert each.after == pytest.approx(
            share(x, weight, found[each.layer].dequantize()), rel=1e-3
        )
    gain = sum(each.before for each in outcomes) / sum(each.after for each in outcomes)
    assert gain > (1.2 if "uint" in name else 1.0)


def row_errors(x: Any, weight: Any, left: Quantized) -> Any:
    return (x @ (left.dequantize() - weight).double().t()).square().sum(0)


def test_clip_leaves_formats_without_scales() -> None:
    job = uneven(scheme("mxfp4_weight_only"))
    plain, _ = choose_codes(job, [])
    found, outcomes = Clip()(job, plain)
    assert outcomes == [] and all(found[name] is plain[name] for name in plain)


def test_experts_that_no_token_reaches() -> None:
    job = job_of(model_of("mixtral"), UINT4)
    few = job.floats[:1]
    job = BlockJob(job.name, job.block, job.layers, few, few)
    with torch.no_grad():
        job.block.mlp.gate.weight[2:] = 0  # of four experts, two are chosen
        job.block.mlp.gate.weight[:2] = 5 * few[0].hidden[0, :1].sign()
        few[0].hidden[:] = few[0].hidden[0, :1]
    outcomes = AWQ()(job)
    down = [each.layer for each in outcomes if each.layer.endswith("down_proj")]
    gates = [each.layer for each in outcomes if each.layer.endswith("gate_proj")]
    assert (
        0 < len(down) < 4
        and len(gates) == 4
        and not any(each.note for each in outcomes)
    )
    _, outcomes = choose_codes(job, [Clip()])
    unseen = {
        each.layer for each in outcomes if each.note == "the data has not reached it"
    }
    assert unseen and all("experts" in name for name in unseen)


@pytest.mark.parametrize("shared", ["weight", "module"])
def test_norms_of_two_blocks_that_are_one(shared: str, tmp_path: Path) -> None:
    """Rescaling one of the blocks would change the other."""
    model = made(llama())
    first, second = model.model.layers
    if shared == "module":
        second.post_attention_layernorm = first.post_attention_layernorm
    else:
        second.post_attention_layernorm.weight = first.post_attention_layernorm.weight
    config = TorchConfig(UINT4, exclude=("lm_head",), algorithms="awq")
    with pytest.raises(
        ModelError,
        match=r"layers\.1\.post_attention_layernorm\.weight is a parameter of something",
    ):
        quantize_model(model, tokens(1), config, progress=False)
    quantize_model(model, tokens(1), config.with_(algorithms="gptq"), progress=False)


def test_memory_and_files_agree(tmp_path: Path) -> None:
    model = made(llama(tie_word_embeddings=False))
    source = saved(model, tmp_path / "source")
    config = TorchConfig(UINT4, exclude=("lm_head",), algorithms=("awq", "clip"))
    report = quantize_model(model, tokens(), config, progress=False)
    assert {each.algorithm for each in report.outcomes} == {"awq", "clip"}
    quantize_checkpoint(source, tokens(), config, tmp_path / "files", progress=False)
    loaded = load_checkpoint(tmp_path / "files")
    torch.testing.assert_close(
        logits(loaded, tokens()[0]), logits(model, tokens()[0]), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AWQ(steps=0),
            "steps of awq is 0; it must be a whole number of at least 1",
        ),
        (lambda: AWQ(duo=1), "duo of awq is 1; it must be true or false"),
        (
            lambda: Clip(steps=2.5),
            "steps of clip is 2.5; it must be a whole number of at least 1",
        ),
        (
            lambda: Clip(shrink=1),
            "shrink of clip is 1; it must be a number of at least 0.01 and of at most 0.99",
        ),
    ],
)
def test_settings(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "algorithms", "most"),
    [  # what AMD Quark 0.13 has with AWQ, and without algorithms
        ("uint4_wo_per_channel", ("awq", "clip"), 4.748),
        ("int8", ("smoothquant",), 4.432),
    ],
)
def test_stories(name: str, algorithms: tuple[str, ...], most: float) -> None:
    folder = data_folder() / "llm"
    with np.load(folder / "eval_tokens_stories260K.npz") as loaded:
        rows = torch.from_numpy(
            loaded["ids"][loaded["len"] >= 256][:, :256].astype(np.int64)
        )
    model = AutoModelForCausalLM.from_pretrained(
        folder / "stories260K", dtype=torch.float32
    ).eval()
    config = TorchConfig(scheme(name), exclude=("lm_head",), algorithms=algorithms)
    quantize_model(model, rows[:40].split(1), config, progress=False)
    assert perplexity(model, list(rows[40:]), progress=False) <= most
