"""Distillation: the divergence it reports against its definition, codes in memory and in files,
what it refuses.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.torch.algorithms.learned_rounding.autoround import SignedRounding
from quark_onnx.torch.algorithms.learned_rounding.distill import Distillation
from quark_onnx.torch.algorithms.learned_rounding.trainable_weight import (
    TrainableWeight,
)
from quark_onnx.torch.algorithms.learned_rounding.training_state import Descent
from quark_onnx.torch.algorithms.weight_rounding.levels import TensorLevels
from quark_onnx.torch.calibration.perplexity import perplexity
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests import torch_families
from tests.torch_models import data_folder, llama, logits, made, saved, tokens

QUICK = Distillation(steps=20, lr=0.02, batch=4, sequences=16)
MXFP4 = TorchConfig(scheme("mxfp4"), exclude=("lm_head",))


def divergence(one: Any, other: Any, data: list[Any]) -> float:
    """In nats for each token, in float64, by its definition."""
    total, count = 0.0, 0
    for batch in data:
        p, q = (
            torch.softmax(logits(model, batch).double(), -1).numpy()
            for model in (one, other)
        )
        total, count = total + float((p * np.log(p / q)).sum()), count + batch.numel()
    return total / count


@pytest.mark.parametrize("name", ["mxfp4", "uint4_wo_32", "int8", "nvfp4", "fp8"])
def test_the_divergence_is_what_its_definition_says_and_falls(name: str) -> None:
    config, floats, data = (
        TorchConfig(scheme(name), exclude=("lm_head",)),
        made(llama()),
        tokens(6),
    )
    nearest, trained = made(llama()), made(llama())
    quantize_model(nearest, data, config, progress=False)
    report = quantize_model(
        trained, data, config.with_(algorithms=(QUICK,)), progress=False
    )
    (outcome,) = report.outcomes
    assert outcome.layer == "" and outcome.algorithm == "distill"
    assert outcome.before == pytest.approx(divergence(floats, nearest, data), rel=1e-3)
    assert outcome.after == pytest.approx(divergence(floats, trained, data), rel=1e-3)
    assert outcome.after < outcome.before
    if name == "mxfp4":
        assert outcome.after < 0.9 * outcome.before


def test_it_goes_on_from_the_codes_of_others() -> None:
    config = TorchConfig(scheme("uint4_wo_32"), exclude=("lm_head",))
    data = tokens(6)
    before = made(llama())
    quantize_model(
        before,
        data,
        config.with_(algorithms=("awq:clip=false", "gptq")),
        progress=False,
    )
    model = made(llama())
    still = Distillation(steps=1, lr=1e-9, sequences=8)
    report = quantize_model(
        model,
        data,
        config.with_(algorithms=("awq:clip=false", "gptq", still)),
        progress=False,
    )
    for name, layer in before.named_modules():
        if isinstance(layer, QuantizedLayer):
            assert torch.equal(layer.codes, model.get_submodule(name).codes)
    assert report.outcomes[-1].after <= report.outcomes[-1].before
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    "algorithms", [(QUICK,), ("autosmoothquant", "gptq", QUICK), ("rotation", QUICK)]
)
def test_a_checkpoint_is_what_memory_holds(
    tmp_path: Path, algorithms: tuple[Any, ...]
) -> None:
    config, data = MXFP4.with_(algorithms=algorithms), tokens(6)
    source = saved(made(llama()), tmp_path / "source")
    one = quantize_checkpoint(source, data, config, tmp_path / "out", progress=False)
    quantize_checkpoint(source, data, config, tmp_path / "again", progress=False)
    model = load_checkpoint(source)
    other = quantize_model(model, data, config, progress=False)
    assert one.outcomes == other.outcomes
    assert torch.equal(
        logits(model, data[0]), logits(load_checkpoint(tmp_path / "out"), data[0])
    )
    files = sorted(file.name for file in (tmp_path / "out").iterdir())
    for file in files:
        assert (tmp_path / "out" / file).read_bytes() == (
            tmp_path / "again" / file
        ).read_bytes()
    plain = CheckpointReader(source)
    reader = CheckpointReader(tmp_path / "out")
    assert (
        torch.equal(reader.get("lm_head.weight"), plain.get("lm_head.weight"))
        or "rotation" in algorithms
    )


@pytest.mark.parametrize("family", torch_families.FAMILIES)
def test_families(family: str) -> None:
    floats, model = (made(torch_families.config_of(family)) for _ in range(2))
    data, head = tokens(4), torch_families.head_of(family)
    config = TorchConfig(
        scheme("mxfp4_weight_only"), exclude=(head,), algorithms=(QUICK,)
    )
    outcome = quantize_model(model, data, config, progress=False).outcomes[-1]
    assert outcome.after == pytest.approx(divergence(floats, model, data), rel=1e-3)
    assert outcome.after <= outcome.before


def test_what_it_refuses() -> None:
    with pytest.raises(ConfigError, match="steps"):
        Distillation(steps=0)
    with pytest.raises(
        ConfigError, match="gptq chooses codes; name it in front of distill"
    ):
        TorchConfig(scheme("mxfp4"), algorithms=("distill", "gptq"))
    config = MXFP4.with_(algorithms=(QUICK,))
    with pytest.raises(DataError, match="token ids"):
        embedded = made(llama())
        data = [
            {"inputs_embeds": embedded.get_input_embeddings()(batch).detach()}
            for batch in tokens()
        ]
        quantize_model(embedded, data, config, progress=False)
    with pytest.raises(ModelError, match="has the float model write text"):
        model = made(llama()).model
        quantize_model(
            model,
            tokens(),
            TorchConfig(scheme("mxfp4"), algorithms=(QUICK,)),
            progress=False,
        )
    assert not [layer for layer in model.modules() if isinstance(layer, QuantizedLayer)]


def test_running_means_are_those_of_where_leaves_have_been() -> None:
    """Of the last twentieth of the steps.

    And the descent goes on from where it was, behind a look at them.
    """
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    codes = quantize(weight, TensorSpec("int4", per_channel=True))
    steps = TensorLevels.of(codes)
    assert steps is not None
    trained = TrainableWeight(weight, codes, steps)
    descent, expected = (
        Descent([trained], 80, 0.1, 0.1),
        [leaf.detach().numpy() + 0 for leaf in trained.leaves()],
    )
    for _ in range(7):
        (trained.weight() - 0.9 * weight).square().sum().backward()
        descent.step(1.0)
        expected = [
            0.75 * mean + 0.25 * leaf.detach().numpy()
            for mean, leaf in zip(expected, descent.leaves, strict=True)
        ]
    places = [leaf.detach().clone() for leaf in descent.leaves]

    def error() -> float:
        for leaf, mean in zip(descent.leaves, expected, strict=True):
            assert np.allclose(leaf.detach().numpy(), mean, rtol=1e-5, atol=1e-6)
        assert not torch.equal(descent.leaves[0], places[0])
        return 0.0

    assert descent.look_at_means(error) == 0.0
    assert all(
        torch.equal(leaf, place)
        for leaf, place in zip(descent.leaves, places, strict=True)
    )
    assert descent.look(lambda: 1.0) == 1.0
    assert descent.finish() == 0.0 and np.allclose(
        descent.leaves[0].detach().numpy(), expected[0], atol=1e-6
    )


def test_the_mean_of_the_last_steps_is_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    means, last = list[Any](), list[Any]()
    step, finish = Descent.step, Descent.finish

    def watched(descent: Descent, share: float) -> None:
        means.append(
            means[-1] if means else [leaf.detach().clone() for leaf in descent.leaves]
        )
        step(descent, share)
        means[-1] = [
            (mean + leaf.detach()) / 2
            for mean, leaf in zip(means[-1], descent.leaves, strict=True)
        ]

    def finished(descent: Descent) -> float:
        error = finish(descent)
        last.extend(descent.leaves)
        return error

    monkeypatch.setattr(Descent, "step", watched)
    monkeypatch.setattr(Descent, "finish", finished)
    quick = replace(QUICK, steps=40)  # means of two steps
    quantize_model(
        made(llama()), tokens(6), MXFP4.with_(algorithms=(quick,)), progress=False
    )
    assert len(means) == quick.steps
    same = [
        all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mean, last, strict=True))
        for mean in means
    ]
    assert sum(same) == 1


@pytest.mark.slow
def test_a_run_that_was_ended_goes_on_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, state = saved(made(llama()), tmp_path / "source"), tmp_path / "state"
    config = MXFP4.with_(algorithms=("gptq", QUICK))

    def run(name: str, resume: Path | None) -> dict[str, bytes]:
        writing = Writing(resume=resume)
        report = quantize_checkpoint(
            source, tokens(4), config, tmp_path / name, writing=writing, progress=False
        )
        outcomes.append(report.outcomes[-1])
        return {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}

    outcomes = list[Any]()
    whole, steps = run("whole", None), list[int]()

    def failing(descent: Descent, share: float) -> None:
        steps.append(len(steps))
        if len(steps) == 8:
            raise KeyboardInterrupt
        step(descent, share)

    step = Descent.step
    monkeypatch.setattr(Descent, "step", failing)
    with pytest.raises(KeyboardInterrupt):
        run("ended", state)
    assert not (tmp_path / "ended").exists()
    assert run("again", state) == whole and outcomes[0] == outcomes[1]
    assert len(steps) == QUICK.steps + 1, "it began anew"
    damaged = next(state.glob("end-*.safetensors"))
    tensors = load_file(damaged)
    for name in (
        "best",
        "done",
        "leaf.0",
        "mean.3",
        "exp_avg.0",
    ):  # begins anew, as an older version's state does
        save_file(
            {key: tensor for key, tensor in tensors.items() if key != name}, damaged
        )
        steps[:] = range(8)  # so that none is ended
        assert run(f"without {name}", state) == whole and len(steps) == 8 + QUICK.steps
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert run("damaged", state) == whole


@pytest.mark.slow
def test_it_makes_a_real_model_better() -> None:
    folder = data_folder() / "llm"
    with np.load(folder / "eval_tokens_stories260K.npz") as loaded:
        rows = torch.from_numpy(
            loaded["ids"][loaded["len"] >= 128][:, :128].astype(np.int64)
        )
    found = {}
    for algorithms in ((), (Distillation(steps=60, lr=0.01, batch=8, sequences=120),)):
        model = load_checkpoint(folder / "stories260K")
        quantize_model(
            model,
            rows[:16].split(8),
            MXFP4.with_(algorithms=algorithms),
            progress=False,
        )
        found[len(algorithms)] = perplexity(model, list(rows[16:80]), progress=False)
    assert found[1] < 0.95 * found[0]
    assert SignedRounding().stage == "weights"
