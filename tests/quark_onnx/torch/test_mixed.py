"""Mixed precision: the choice against all choices, what gets the same scheme, what stays as it was."""  # noqa: E501

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quark_onnx.cli import main
from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.pipelines.mixed_precision import Measured, Option, mix, spend
from quark_onnx.torch.validate import validate
from tests import torch_families
from tests.torch_models import llama, logits, made, saved, tokens

#: 4.25, 6.25 and 8.25 bits for each weight.
SCHEMES = ("mxfp4", "mxfp6_e2m3", "mxfp8")


def problem(rows: list[list[tuple[int, float]]], weights: int = 100) -> Measured:
    """Groups with options of so many bits and so much divergence."""
    return [
        (
            (str(place),),
            weights,
            tuple(
                sorted(
                    (Option(f"s{n}", *each) for n, each in enumerate(row)), key=_order
                )
            ),
        )
        for place, row in enumerate(rows)
    ]


def _order(option: Option) -> tuple[int, float]:
    return option.bits, option.divergence


def outcomes(found: Measured) -> list[tuple[int, float]]:
    """Bits and divergence of every choice that there is."""
    choices = itertools.product(*(options for _, _, options in found))
    return [
        (sum(each.bits for each in one), sum(each.divergence for each in one))
        for one in choices
    ]


def hull(points: list[tuple[int, float]], bits: float) -> float:
    """The least divergence of any mixture of two choices with so many bits: no choice can be
    better.
    """
    lower = [d for b, d in points if b <= bits]
    pairs = (
        (p, q) for p, q in itertools.product(points, points) if p[0] <= bits < q[0]
    )
    mixed = [p[1] + (q[1] - p[1]) * (bits - p[0]) / (q[0] - p[0]) for p, q in pairs]
    return min(lower + mixed)


options = st.lists(
    st.tuples(st.integers(100, 900), st.floats(0, 10)), min_size=1, max_size=4
)


@given(rows=st.lists(options, min_size=1, max_size=4), share=st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_the_choice_against_all_choices(
    rows: list[list[tuple[int, float]]], share: float
) -> None:
    found = problem(rows)
    points = outcomes(found)
    least, most = min(b for b, _ in points), max(b for b, _ in points)
    budget = least + share * (most - least) + 1e-6
    picked = spend(found, budget / (100 * len(rows)))
    bits = sum(each.chosen.bits for each in picked)
    divergence = sum(each.chosen.divergence for each in picked)
    assert bits <= budget
    # no choice is better by more than one step of one group: the distance to the hull's edge
    lost = max(max(d for _, d in row) - min(d for _, d in row) for row in rows)
    assert divergence <= hull(points, budget) + lost + 1e-9


@given(rows=st.lists(options, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_on_the_corners_of_the_hull_it_is_the_best_choice(
    rows: list[list[tuple[int, float]]],
) -> None:
    found = problem(rows)
    points = outcomes(found)
    best = {bits: min(d for b, d in points if b <= bits) for bits, _ in points}
    corners = [bits for bits, d in best.items() if _is_corner(bits, d, best)]
    assert corners
    for bits in corners:
        picked = spend(found, (bits + 1e-6) / (100 * len(rows)))
        assert sum(each.chosen.divergence for each in picked) == pytest.approx(
            best[bits], abs=1e-9
        )


def _is_corner(bits: int, divergence: float, best: dict[int, float]) -> bool:
    """Whether a point lies below the line between any two others around it, by more than rounding."""  # noqa: E501
    left, right = (
        [(b, d) for b, d in best.items() if (b < bits) is side and b != bits]
        for side in (True, False)
    )
    if any(d <= divergence + 1e-6 for _, d in left):
        return False
    lines = (
        p[1] + (q[1] - p[1]) * (bits - p[0]) / (q[0] - p[0])
        for p in left
        for q in right
    )
    return all(divergence < each - 1e-6 for each in lines)


def test_options_that_are_worse_and_larger_are_never_chosen() -> None:
    found = problem([[(400, 1.0), (600, 2.0), (800, 0.5)]])
    assert [spend(found, bits)[0].chosen.bits for bits in (4, 6, 7.9, 8)] == [
        400,
        400,
        400,
        800,
    ]
    with pytest.raises(
        ConfigError,
        match=r"a budget of 3 bits is too small: the schemes need 4\.000 at least",
    ):
        spend(found, 3)


@pytest.fixture(scope="module")
def model() -> Any:
    return made(llama())


@pytest.mark.parametrize("bits", [4.25, 5.0, 6.5, 9.0])
def test_a_budget_is_kept_and_siblings_are_alike(model: Any, bits: float) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain, types = (
        logits(model, tokens()[0]),
        [type(module) for module in model.modules()],
    )
    found = mix(model, tokens(), SCHEMES, bits, progress=False)
    assert found.bits <= bits
    assert sum(group.weights for group in found.groups) == sum(
        tensor.numel() for name, tensor in before.items() if "proj" in name
    )
    specs = dict(found.config.layers)
    for block in range(2):
        for parent, siblings in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            assert (
                len(
                    {
                        specs[f"model.layers.{block}.{parent}.{each}_proj"]
                        for each in siblings
                    }
                )
                == 1
            )
    # the model is what it was
    assert [type(module) for module in model.modules()] == types
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()
    )
    assert torch.equal(logits(model, tokens()[0]), plain)


def test_more_bits_buy_less_divergence(model: Any) -> None:
    found = [
        mix(model, tokens(), SCHEMES, bits, progress=False)
        for bits in (4.25, 5.5, 7.0, 8.25)
    ]
    assert {group.chosen.scheme for group in found[0].groups} == {"mxfp4"}
    divergences = [each.divergence for each in found]
    assert (
        divergences == sorted(divergences, reverse=True)
        and divergences[-1] < 0.5 * divergences[0]
    )
    assert len({group.chosen.scheme for group in found[1].groups}) > 1


def test_the_divergence_of_a_group_is_that_of_the_model_with_it_quantized(
    model: Any,
) -> None:
    found = mix(model, tokens(), SCHEMES[:2], 9, progress=False)
    group = found.groups[1]
    config = TorchConfig(layers=tuple((name, scheme("mxfp4")) for name in group.layers))
    other = made(llama())
    quantize_model(other, None, config, progress=False)
    total = 0.0
    for batch in tokens():
        p, q = (
            torch.log_softmax(logits(each, batch).double(), -1)
            for each in (model, other)
        )
        total += float((p.exp() * (p - q)).sum(-1).mean()) / len(tokens())
    measured = next(each.divergence for each in group.options if each.scheme == "mxfp4")
    assert measured == pytest.approx(total, rel=1e-3, abs=1e-7)


def test_all_experts_of_a_block_are_alike() -> None:
    found = mix(
        made(torch_families.config_of("qwen3_moe")),
        tokens(),
        SCHEMES,
        5.5,
        progress=False,
    )
    specs = dict(found.config.layers)
    for block in range(2):
        own = {
            spec
            for name, spec in specs.items()
            if name.startswith(f"model.layers.{block}.mlp.experts.")
        }
        assert len(own) == 1
    assert sum(".experts." in name for name in specs) == 2 * 4 * 3
    assert not any(name.endswith(".gate") for name in specs)  # a router


def test_layers_that_are_named_keep_theirs(model: Any) -> None:
    config = TorchConfig(
        layers=(("*.o_proj", scheme("int4_wo_32")),), exclude=("lm_head", "*.0.mlp.*")
    )
    found = mix(model, tokens(), SCHEMES, 5.5, config=config, progress=False)
    names = [name for group in found.groups for name in group.layers]
    assert not any(name.endswith("o_proj") or ".0.mlp." in name for name in names)
    for name in ("model.layers.1.self_attn.o_proj", "model.layers.0.self_attn.o_proj"):
        assert found.config.spec_of(name, "Linear") == scheme("int4_wo_32")
    assert found.config.spec_of("model.layers.0.mlp.up_proj", "Linear") is None


def test_a_static_scale_counts(model: Any) -> None:
    found = mix(model, tokens(), ("mxfp4", "fp8"), 6, progress=False)
    other = made(llama())
    report = quantize_model(other, tokens(), found.config, progress=False)
    assert {"fp8e4m3", "mxfp4e2m1"} == {
        spec.weight.dtype.name for spec in report.quantized.values() if spec.weight
    }


def test_bad_input(model: Any) -> None:
    with pytest.raises(ConfigError, match="there are no schemes"):
        mix(model, tokens(), (), 5, progress=False)
    with pytest.raises(ConfigError, match="unknown scheme 'mxfp5'"):
        mix(model, tokens(), ("mxfp4", "mxfp5"), 5, progress=False)
    with pytest.raises(DataError, match="the data is empty"):
        mix(model, [], SCHEMES, 5, progress=False)
    with pytest.raises(ModelError, match="no list of blocks"):
        mix(
            torch.nn.Sequential(torch.nn.Linear(32, 32)),
            [torch.ones(1, 32)],
            SCHEMES,
            5,
            progress=False,
        )
    with pytest.raises(ConfigError, match=r"too small: the schemes need 4\.250"):
        mix(model, tokens(), SCHEMES, 4, progress=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    np.save(tmp_path / "tokens.npy", torch.cat(tokens(6)).numpy())
    return saved(made(llama()), tmp_path / "source")


def command(source: Path, *more: str) -> list[str]:
    out = source.parent / "out"
    return ["llm", "ptq", str(source), "-o", str(out), "--length", "12", *more]


def test_the_command(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [
        "--scheme",
        "mxfp4+mxfp6_e2m3+fp8",
        "--bits",
        "6",
        "--data",
        str(tmp_path / "tokens.npy"),
    ]
    assert (
        main(command(source, *chosen, "--report", str(tmp_path / "report"), "--json"))
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert (
        json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
        == document
    )
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert f"{document['mixture']['bits']:.3f}" in page and "Mixed precision" in page
    assert validate(tmp_path / "out", "vllm").right
    # what lies in the files is what was said, and so are the bits
    mixture, reader = document["mixture"], CheckpointReader(tmp_path / "out")
    count = 0
    for group in mixture["groups"]:
        for name in group["layers"]:
            parts = [
                reader.get(f"{name}.{end}")
                for end in ("weight", "weight_scale")
                if f"{name}.{end}" in reader
            ]
            count += 8 * sum(part.nbytes for part in parts)
    weights = sum(group["weights"] for group in mixture["groups"])
    assert (
        count / weights == pytest.approx(mixture["bits"], rel=1e-3)
        and mixture["bits"] <= 6
    )
    assert {group["scheme"] for group in mixture["groups"]} > {"mxfp4"}
    # and the same choice is made in memory
    floats = load_checkpoint(source)
    batches = [row[None] for row in torch.from_numpy(np.load(tmp_path / "tokens.npy"))]
    own = mix(floats, batches, ("mxfp4", "mxfp6_e2m3", "fp8"), 6, progress=False)
    assert [group.chosen.scheme for group in own.groups] == [
        group["scheme"] for group in mixture["groups"]
    ]
    assert replace(own.config, layers=()) == TorchConfig(exclude=("lm_head",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--scheme", "mxfp4+fp8", "--data", "D"],
            "names several schemes; give --bits",
        ),
        (
            ["--scheme", "mxfp4", "--bits", "5", "--data", "D"],
            "--bits chooses among several schemes",
        ),
        (
            ["--scheme", "mxfp4+mxfp4", "--bits", "5", "--data", "D"],
            "--bits chooses among several schemes",
        ),
        (["--scheme", "mxfp4+mxfp8", "--bits", "5"], "give --data"),
        (
            ["--scheme", "mxfp4+mxfp8", "--bits", "3", "--data", "D"],
            "too small: the schemes need 4.250 at least",
        ),
        (
            ["--scheme", "mxfp4+mx9", "--bits", "9", "--data", "D"],
            "has no place in a checkpoint of the layout 'quark'",
        ),
        (
            ["--scheme", "mxfp4+mxfp5", "--bits", "9", "--data", "D"],
            "unknown scheme 'mxfp5'",
        ),
        (
            [
                "--scheme",
                "mxfp4+fp8",
                "--bits",
                "5",
                "--group-size",
                "32",
                "--data",
                "D",
            ],
            "--group-size belongs to a",
        ),
    ],
)
def test_bad_commands(
    source: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(source.parent / "tokens.npy")
    assert (
        main(command(source, *(data if each == "D" else each for each in options))) == 2
    )
    assert message in capsys.readouterr().err
    assert not (source.parent / "out").exists()


def test_a_taken_folder_is_refused_before_the_work(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "quark_onnx.torch.pipelines.mixed_precision.mix",
        lambda *_, **__: pytest.fail("too late"),
    )
    (source.parent / "out").mkdir()
    (source.parent / "out" / "mine").write_text("x")
    data = str(source.parent / "tokens.npy")
    assert (
        main(command(source, "--scheme", "mxfp4+mxfp8", "--bits", "5", "--data", data))
        == 2
    )
    assert "exists already and is not empty" in capsys.readouterr().err
