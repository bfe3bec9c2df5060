"""GPTQ, GPTAQ and Qronos: against oracles of few columns, on all families, in memory and file to
file.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.kernels.gptq import Compensation
from quark_onnx.kernels.levels import Levels
from quark_onnx.torch.algorithms.base import BlockJob
from quark_onnx.torch.algorithms.gptq import gptq, hessian
from quark_onnx.torch.algorithms.gptq import solver as solver_module
from quark_onnx.torch.algorithms.gptq.gptq import GPTAQ, GPTQ, Qronos
from quark_onnx.torch.algorithms.gptq.hessian import HessianStats, collect_hessians
from quark_onnx.torch.algorithms.gptq.solver import Solver
from quark_onnx.torch.algorithms.scheduling import stages
from quark_onnx.torch.algorithms.scheduling.stages import stages_of
from quark_onnx.torch.algorithms.weight_rounding.levels import TensorLevels
from quark_onnx.torch.calibration.block_stream import (
    BlockArguments,
    BlockStream,
    inference,
)
from quark_onnx.torch.config.algorithm_order import algorithm
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.models.experts import unfuse_experts
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.models.structure import blocks_of
from quark_onnx.torch.pipelines import file_run
from quark_onnx.torch.pipelines.block import layers_in
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import chosen_layers, quantize_model
from tests import torch_families
from tests.torch_models import VOCABULARY, llama, logits, made, saved, tokens

UINT4 = LayerSpec(TensorSpec("uint4", symmetric=False, block_size=32))


def problem(rows: int, columns: int, seed: int = 0) -> tuple[Any, Any]:
    """A weight, and rows of inputs that depend on each other."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator)
    x = torch.randn(4 * columns, columns, generator=generator) @ mix
    return torch.randn(rows, columns, generator=generator), x


def loss(weight: Any, left: Any, x: Any) -> Any:
    """The squared error of each output, in float64."""
    return ((left.double() - weight.double()) @ x.double().T).square().sum(1)


def brain_surgeon(
    weight: Any, x: Any, scale: Any, qmax: int, damping: float
) -> np.ndarray:
    """Codes by the textbook, columns in order: after each one, the inverse of the rest by
    elimination, in float64.
    """
    gram = (x.double().T @ x.double()).numpy()
    inverse = np.linalg.inv(gram + damping * np.diag(gram).mean() * np.eye(len(gram)))
    left, codes = weight.double().numpy().copy(), np.zeros(weight.shape)
    for place in range(weight.shape[1]):
        codes[:, place] = np.clip(np.rint(left[:, place] / scale), -qmax, qmax)
        error = (left[:, place] - codes[:, place] * scale) / inverse[place, place]
        left -= error[:, None] * inverse[place]
        inverse -= np.outer(inverse[:, place], inverse[place]) / inverse[place, place]
    return codes


def test_damping_of_qronos_is_a_share_of_what_it_says() -> None:
    """The paper's: of the greatest eigenvalue, which numpy computes in float64."""
    of_greatest = Qronos(0.1, relative_to="eigenvalue")
    for across in (
        -1.0,
        1.0,
    ):  # the sums of rows are at right angles to what is looked for, or are it
        assert of_greatest.damping_for(
            torch.tensor([[2.0, across], [across, 2.0]])
        ) == pytest.approx(0.15)
    _, x = problem(1, 40, 4)
    gram = x.T @ x
    greatest = np.linalg.eigvalsh(gram.double().numpy())[-1]
    found = {
        name: Solver.of(gram, Qronos(0.01, relative_to=name).damping_for(gram))
        for name in ("mean", "eigenvalue")
    }
    assert found["eigenvalue"].ridge.numpy() == pytest.approx(0.01 * greatest, rel=1e-3)
    assert found["mean"].ridge.numpy() == pytest.approx(
        0.01 * float(gram.diagonal().mean()), rel=1e-5
    )
    with pytest.raises(
        ConfigError,
        match='relative_to of qronos is \'most\'; it must be "mean" or "eigenvalue"',
    ):
        algorithm("qronos:relative_to=most")


@pytest.mark.parametrize("tries", [1, 3])
@pytest.mark.parametrize("polish", [0, 2])
def test_rows_that_are_swept_apart_are_those_that_are_swept_together(
    tries: int, polish: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, as long as parts have 16 rows or a multiple."""
    weight, x = problem(96, 300, 2)
    solver = Solver.of(x.T @ x, 0.02)
    steps = [
        TensorLevels(torch.full((96, 1), 0.2 + 0.1 * place), None, -7, 7, size=300)
        for place in range(tries)
    ]
    whole = solver.quantize(weight, steps, polish)
    off = weight - whole.Q
    losses, ridged = solver.losses(off), solver.damping_costs(whole.Q, weight)
    monkeypatch.setattr(solver_module, "AT_ONCE", 32 * 300 * tries)
    monkeypatch.setattr(solver_module, "LOSSES_AT_ONCE", 16 * 300)
    parts = solver.quantize(weight, steps, polish)
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
    assert tries == 1 or len(set(whole.choice.tolist())) > 1
    assert torch.allclose(solver.losses(off), losses, rtol=1e-5)
    assert torch.allclose(losses.double(), loss(weight, whole.Q, x), rtol=1e-3)
    assert torch.allclose(solver.damping_costs(whole.Q, weight), ridged, rtol=1e-5)
    assert torch.allclose(
        ridged.double(),
        (off.double().square() * solver.ridge.double()).sum(1),
        rtol=1e-5,
    )


def test_what_is_done_for_a_column_stays_in_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that wait for each other behind each short operation are a hundred times slower
    beside other work.
    """
    weight, x = problem(5, 70)
    own, move = set[int](), solver_module.ColumnLevels.round_column

    def moved(*args: Any) -> None:
        own.add(torch.get_num_threads())
        move(*args)

    monkeypatch.setattr(solver_module.ColumnLevels, "round_column", moved)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        Solver.of(x.T @ x).quantize(
            weight,
            [TensorLevels(torch.full_like(weight, 0.5), None, -3, 3)],
            descent_passes=1,
        )
        assert own == {1} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_weights_without_inputs() -> None:
    solver = Solver.of(torch.zeros(0, 0), 0.05)
    empty = torch.zeros(4, 0)
    assert (
        solver.losses(empty).tolist()
        == solver.damping_costs(empty, empty).tolist()
        == [0.0] * 4
    )


def test_the_sweep_is_the_textbooks() -> None:
    weight, x = problem(5, 12)
    steps = TensorLevels(torch.full_like(weight, 0.5), None, -3, 3)
    found = Solver.of(x.T @ x, 0.02, act_order=False).quantize(weight, [steps]).Q
    assert np.array_equal(found.numpy() / 0.5, brain_surgeon(weight, x, 0.5, 3, 0.02))


@pytest.mark.parametrize("act_order", [False, True])
def test_the_sweep_is_that_of_numpy(act_order: bool) -> None:
    weight, x = problem(7, 300, 1)
    gram = (x.double().T @ x.double()) / 100
    steps = TensorLevels(torch.full_like(weight, 0.25), None, -7, 7)
    found = Solver.of(gram, 0.01, act_order).quantize(weight, [steps]).Q.numpy()
    field = np.ones((1, *weight.shape), np.float32)
    lattice = Levels(
        field * np.float32(0.25), np.zeros(0, np.float32), field * -7, field * 7
    )
    own, _ = Compensation(
        gram.numpy()[None], damping=0.01, act_order=act_order
    ).rounded(weight.double().numpy()[None], lattice)
    better = (
        loss(weight, torch.from_numpy(own[0]), x) * 1.01 + 1e-6
    )  # rows that numpy leaves at the nearest
    assert bool((loss(weight, torch.from_numpy(found), x) <= better * 1.05).all())
    assert (own[0] == found).mean() > 0.98  # float32 beside float64: a tie now and then


def test_a_second_look_comes_near_to_the_best_of_all() -> None:
    weight, x = problem(24, 6, 2)
    steps = TensorLevels(torch.full_like(weight, 0.7), None, -2, 1)
    solver = Solver.of(x.T @ x, 0.0, True)
    plain, polished = (
        loss(weight, solver.quantize(weight, [steps], n).Q, x) for n in (0, 8)
    )
    every = torch.tensor(list(itertools.product(range(-2, 2), repeat=6))) * 0.7
    best = torch.stack(
        [loss(row[None].expand(len(every), -1), every, x).min() for row in weight]
    )
    assert bool((polished <= plain * (1 + 1e-5)).all()) and polished.sum() < plain.sum()
    assert bool((best <= polished * (1 + 1e-5)).all())
    assert float((polished / best).median()) < 1.2


@pytest.mark.parametrize("share", [0.0, 0.7])
@pytest.mark.parametrize("polish", [0, 2])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("damping", [0.05, 1e4])
def test_the_loss_of_a_sweep_is_that_of_its_codes(
    share: float, polish: int, act_order: bool, damping: float
) -> None:
    """In float64, up to a constant; inputs that were always zero cost nothing."""
    weight, x = problem(9, 40, 5)
    x[:, 7] = 0
    wrong = x + 0.2 * torch.randn(
        x.shape, generator=torch.Generator().manual_seed(6)
    ) * (x != 0)
    gram = HessianStats()
    gram.add(wrong, x)
    found = GPTAQ(
        damping, alpha=share, coordinate_descent_passes=polish, act_order=act_order
    )
    start = quantize(weight, TensorSpec("uint3", symmetric=False, block_size=8))
    made = {"layer": start}
    (outcome,) = found.quantize_group(["layer"], {"layer": weight}, gram, made)
    assert not torch.equal(made["layer"].codes, start.codes)
    aim = weight.double() @ (wrong + share * (x - wrong)).double().T
    off, plain = (
        float((each.dequantize().double() @ wrong.double().T - aim).square().sum())
        for each in (made["layer"], start)
    )
    power = float((weight.double() @ wrong.double().T).square().sum())
    assert outcome.before == pytest.approx(plain / power, rel=1e-4)
    assert outcome.after == pytest.approx(off / power, rel=1e-4)
    assert outcome.after < (0.9 if damping < 1 else 1) * outcome.before


def test_what_is_wrong_already_is_made_good() -> None:
    """Before it is rounded, the weight on wrong inputs becomes the least squares solution."""
    weight, x = problem(6, 10, 3)
    wrong = x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    solver = Solver.of(wrong.T @ wrong, 1e-9, True)
    pull = wrong.T @ (x - wrong) @ weight.T
    target = weight + solver.solve(pull).T
    wanted = np.linalg.lstsq(
        wrong.double().numpy(), (x @ weight.T).double().numpy(), rcond=None
    )[0].T
    assert np.abs(target.numpy() - wanted).max() < 1e-4
    assert np.abs(weight.numpy() - wanted).max() > 0.1


@pytest.mark.parametrize(
    "name",
    [
        "uint4",
        "int3",
        "uint2",
        "int8",
        "fp8e4m3",
        "mxfp4e2m1",
        "mxfp6e2m3",
        "mxint8",
        "nvfp4",
    ],
)
def test_levels_are_the_codes_of_every_format(name: str) -> None:
    blocks = {"uint4": 32, "uint2": 32}.get(name, 0)
    symmetric = not name.startswith("uint")
    channels = not blocks and name in ("int3", "int8", "fp8e4m3")
    spec = TensorSpec(
        name, symmetric=symmetric, block_size=blocks, per_channel=channels
    )
    weight, _ = problem(6, 80, 4)
    start = quantize(weight, spec)
    steps = TensorLevels.of(start)
    assert steps is not None
    levels = steps.levels(weight)
    assert torch.equal(steps.values(levels), start.dequantize())
    again = steps.put(start, steps.values(levels))
    assert torch.equal(again.codes.view(torch.uint8), start.codes.view(torch.uint8))
    other = steps.put(start, weight * 0.5)
    assert torch.equal(other.dequantize(), steps.values(steps.levels(weight * 0.5)))


STAGES: dict[str, list[set[str]]] = {
    "llama3": [
        {"q_proj", "k_proj", "v_proj"},
        {"o_proj"},
        {"gate_proj", "up_proj"},
        {"down_proj"},
    ],
    "opt": [{"q_proj", "k_proj", "v_proj"}, {"out_proj"}, {"fc1"}, {"fc2"}],
    "gptj": [
        {"q_proj", "k_proj", "v_proj", "fc_in"},
        {"out_proj", "fc_out"},
    ],  # attention beside the other half
    "phi3": [{"qkv_proj"}, {"o_proj"}, {"gate_up_proj"}, {"down_proj"}],
    "mixtral": [
        {"q_proj", "k_proj", "v_proj"},
        {"o_proj"},
        {"gate_proj", "up_proj"},
        {"down_proj"},
    ],
}


def first_block(model: Any, config: TorchConfig, data: list[Any]) -> BlockJob:
    chosen, _ = chosen_layers(model, config)
    blocks = blocks_of(model)
    name, block = next(iter(blocks.items()))
    walk = BlockStream(model, blocks, data)
    return BlockJob(
        name, block, layers_in(chosen, name), walk.calls(name), walk.calls(name)
    )


@pytest.mark.parametrize("name", ["gptq", "gptaq", "qronos"])
def test_what_is_swept_at_once_changes_no_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers that read the same and all of their ranges together, or rows of one after the
    other; schemes that cannot be swept together stand side by side.
    """
    config = TorchConfig(
        UINT4,
        exclude=("lm_head",),
        layers={
            "*.k_proj": scheme("int8"),
            "*.v_proj": scheme("mxfp4_weight_only"),
            "*.up_proj": scheme("fp8"),
        },
        algorithms=(name,),
    )
    found = []
    for at_once in (solver_module.AT_ONCE, 7 * 64):
        for module in (solver_module, gptq):
            monkeypatch.setattr(module, "AT_ONCE", at_once)
        model = made(llama())
        report = quantize_model(model, tokens(4), config, progress=False)
        found.append(
            (logits(model, tokens(1)[0]), [each.layer for each in report.outcomes])
        )
    (whole, order), (parts, other) = found
    assert order == other and len(order) == len(set(order))
    assert float((whole - parts).abs().max()) <= 1e-5 * float(whole.abs().max())


@pytest.mark.parametrize("family", STAGES)
def test_stages_are_found_by_what_depends_on_what(family: str) -> None:
    model = made(torch_families.config_of(family))
    unfuse_experts(model)
    with inference(model):
        job = first_block(model, TorchConfig(UINT4, exclude=("lm_head",)), tokens(1))
        order = stages_of(job.block, job.layers, job.calls[0])
    found = [
        {name.rsplit(".", 1)[-1] for group in stage.groups for name in group}
        for stage in order
    ]
    assert found == STAGES[family]
    assert len(order[0].groups) == 1  # all of them read the same


@pytest.mark.parametrize(("family", "runs"), [("llama3", 1), ("mixtral", 2)])
def test_stages_of_blocks_alike_are_found_once(
    family: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for experts: which are chosen differs."""
    seen = list[str]()

    def counting(block: Any, layers: Any, call: BlockArguments) -> Any:
        seen.append(next(iter(layers)))
        return stages_of(block, layers, call)

    config = TorchConfig(UINT4, exclude=("lm_head",), algorithms=("gptq",))
    found = []
    for patched in (True, False):
        monkeypatch.setattr(stages, "stages_of", counting if patched else stages_of)
        if not patched:
            monkeypatch.setattr(
                hessian,
                "stages_in",
                lambda job, names: stages_of(
                    job.block, _some(job, names), job.calls[0]
                ),
            )
        model = made(torch_families.config_of(family))
        quantize_model(model, tokens(4), config, progress=False)
        found.append(logits(model, tokens(1)[0]))
    assert (
        len(blocks_of(made(torch_families.config_of(family)))) == 2
        and len(seen) == runs
    )
    assert torch.equal(*found)


def _some(job: BlockJob, names: Any) -> Any:
    return {name: job.layers[name] for name in names}


def test_grams_are_sums_over_what_layers_read() -> None:
    model = made(llama())
    with inference(model):
        job = first_block(model, TorchConfig(UINT4, exclude=("lm_head",)), tokens(3))
        stages = stages_of(job.block, job.layers, job.calls[0])
        seen: dict[str, list[Any]] = {"mlp.down_proj": [], "self_attn.q_proj": []}
        hooks = [
            job.block.get_submodule(name).register_forward_pre_hook(
                lambda _, args, name=name: seen[name].append(args[0])
            )
            for name in seen
        ]
        for call in job.calls:
            call.run(job.block)
        for hook in hooks:
            hook.remove()
        for name, stage in (
            ("self_attn.q_proj", stages[0]),
            ("mlp.down_proj", stages[3]),
        ):
            gram = collect_hessians(job, stage, {}, exact=True)[f"{job.name}.{name}"]
            rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in seen[name]]).double()
            assert gram.count == 36
            torch.testing.assert_close(
                gram.xx.double(), rows.T @ rows, rtol=1e-4, atol=1e-4
            )
            assert not gram.xd.any()  # the same calls in both streams


@pytest.mark.parametrize(
    ("family", "chosen"),
    [(family, GPTAQ()) for family in torch_families.FAMILIES]
    + [
        (family, chosen)
        for family in ("llama3", "qwen3_moe", "gpt2")
        for chosen in (GPTQ(), Qronos())
    ],
    ids=str,
)
def test_families(family: str, chosen: Any) -> None:
    model = made(torch_families.config_of(family))
    config = TorchConfig(
        UINT4, exclude=(torch_families.head_of(family),), algorithms=(chosen,)
    )
    report = quantize_model(model, tokens(2), config, progress=False)
    assert report.outcomes and {each.algorithm for each in report.outcomes} == {
        chosen.name
    }
    for each in report.outcomes:
        assert each.after <= each.before, each
    better = [each for each in report.outcomes if each.after < 0.95 * each.before]
    assert len(better) > len(report.outcomes) / 3
    assert torch.isfinite(logits(model, tokens(1)[0])).all()
    unreached = [
        each.layer
        for each in report.outcomes
        if each.note == "the data has not reached it"
    ]
    assert all("expert" in name for name in unreached)


@pytest.mark.parametrize(
    "name", ["int8", "fp8", "mxfp4", "mxfp6_e2m3", "int4_wo_32", "ptpc_fp8", "nvfp4"]
)
def test_schemes(name: str) -> None:
    float_model, plain, better = (made(llama()) for _ in range(3))
    config = TorchConfig(scheme(name), exclude=("lm_head",))
    data = [
        torch.randint(
            0, VOCABULARY, (1, 48), generator=torch.Generator().manual_seed(seed)
        )
        for seed in range(8)
    ]
    quantize_model(plain, data, config, progress=False)
    report = quantize_model(
        better, data, config.with_(algorithms="gptq"), progress=False
    )
    before, after = (
        sum(getattr(each, name) for each in report.outcomes)
        for name in ("before", "after")
    )
    assert after < 0.95 * before
    held_out = tokens(4, 48)
    wanted = [logits(float_model, batch) for batch in held_out]
    errors = [
        sum(
            float((logits(model, batch) - like).square().mean())
            for batch, like in zip(held_out, wanted, strict=True)
        )
        for model in (plain, better)
    ]
    assert (
        errors[1] < 1.05 * errors[0]
    )  # int8 loses little in weights, and much in activations


@pytest.mark.parametrize("family", ["llama3", "mixtral", "gpt2", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_file_to_file_is_as_in_memory(family: str, dtype: Any, tmp_path: Path) -> None:
    source = saved(made(torch_families.config_of(family), dtype), tmp_path / "model")
    config = TorchConfig(UINT4, exclude=("lm_head",), algorithms=("gptaq",))
    report = quantize_checkpoint(
        source, tokens(3), config, tmp_path / "out", progress=False
    )
    model = made(torch_families.config_of(family), dtype)
    other = quantize_model(model, tokens(3), config, progress=False)
    assert [each.layer for each in report.outcomes] == [
        each.layer for each in other.outcomes
    ]
    assert report.outcomes == other.outcomes
    layers = [each for each in model.modules() if isinstance(each, QuantizedLayer)]
    scales = [each.scale for each in layers]
    stored = [
        tensor
        for file in (tmp_path / "out").glob("*.safetensors")
        for tensor in load_file(file).values()
    ]
    for scale in scales:
        assert any(
            each.numel() == scale.numel()
            and torch.equal(
                each.sort()[0].float().reshape(-1).sort()[0],
                scale.float().reshape(-1).sort()[0],
            )
            for each in stored
            if each.dtype == scale.dtype
        )


class Killed(BaseException):
    """Ends a run."""


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_run_that_was_ended_goes_on_with_the_same_bytes(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(made(llama(num_hidden_layers=3)), tmp_path / "model")
    config = TorchConfig(scheme("int8"), exclude=("lm_head",), algorithms=("gptaq",))

    def run(name: str, resume: Path | None) -> tuple[dict[str, bytes], Any]:
        report = quantize_checkpoint(
            source,
            tokens(2),
            config,
            tmp_path / name,
            writing=Writing(resume=resume),
            progress=False,
        )
        return {
            file.name: file.read_bytes() for file in (tmp_path / name).iterdir()
        }, report.outcomes

    wanted = run("whole", None)
    done = list[None]()

    def counted() -> None:
        done.append(None)
        if len(done) > block:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(file_run, "return_freed_memory", counted)
        with pytest.raises(Killed):
            run("out", tmp_path / "resume")
    assert run("out", tmp_path / "resume") == wanted


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "share"), [(GPTQ(), 0.0), (GPTAQ(alpha=0.5), 0.5), (Qronos(), 1.0)]
)
def test_errors_are_those_of_what_layers_compute(make: Any, share: float) -> None:
    """Against what the layer should compute, with its own inputs and as much of the float model's
    as is made good.
    """
    model = made(llama())
    job = first_block(model, TorchConfig(UINT4, exclude=("lm_head",)), tokens(3, 16))
    generator = torch.Generator().manual_seed(0)
    noise = [
        0.3 * torch.randn(call.hidden.shape, generator=generator) for call in job.floats
    ]
    job.calls = [
        replace(call, hidden=call.hidden + each)
        for call, each in zip(job.floats, noise, strict=True)
    ]
    layers = {
        name: entry for name, entry in job.layers.items() if name.endswith("q_proj")
    }
    job = replace(job, layers=layers)
    (name, weight, spec), *_ = job.weights()
    assert spec.weight is not None
    plain = quantize(weight, spec.weight)
    found, (outcome,) = make(job, {name: plain})
    norm = model.model.layers[0].input_layernorm
    x, exact = (
        torch.cat([norm(call.hidden) for call in calls]).flatten(0, 1).double()
        for calls in (job.calls, job.floats)
    )
    wanted = (x + share * (exact - x)) @ weight.double().T
    power = (x @ weight.double().T).square().sum()
    for left, told in ((plain, outcome.before), (found[name], outcome.after)):
        error = (x @ left.dequantize().double().T - wanted).square().sum()
        assert told == pytest.approx(float(error / power), rel=1e-3)


@pytest.mark.parametrize("name", ["gptq", "autoround:steps=2"])
def test_levels_beyond_float32_stay_as_they_are(name: str) -> None:
    model, spec = made(llama()), LayerSpec(TensorSpec("int32", per_channel=True))
    report = quantize_model(
        model,
        tokens(1),
        TorchConfig(spec, exclude=("lm_head",), algorithms=name),
        progress=False,
    )
    assert len(report.outcomes) == 14 and all(
        each.note.startswith("int32 ") for each in report.outcomes
    )
    assert torch.allclose(
        logits(model, tokens(1)[0]), logits(made(llama()), tokens(1)[0]), atol=1e-4
    )


def test_layers_that_are_run_twice() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.again, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.relu(self.again(torch.tanh(3 * self.again(x)))))

    torch.manual_seed(0)
    block = Block()
    calls = [BlockArguments(torch.randn(1, 8, 32)) for _ in range(3)]
    job = BlockJob(
        "0",
        block,
        {f"0.{name}": (layer, UINT4) for name, layer in block.named_children()},
        calls,
        calls,
    )
    first = stages_of(block, job.layers, calls[0])[0]
    seen = list[Any]()
    hook = block.again.register_forward_pre_hook(
        lambda module, args: seen.append(args[0][0].double())
    )
    with torch.no_grad():
        found = collect_hessians(job, first, {}, exact=False)["0.again"]
        seen.clear()
        for call in calls:
            call.run(block)
    hook.remove()
    x = torch.cat(seen)
    assert found.count == len(x) == 48
    assert torch.allclose(found.xx.double(), x.T @ x, rtol=1e-4, atol=1e-4)


def test_inputs_that_say_little_are_no_failure() -> None:
    """One token, again and again: of rank one; and a channel that is always zero."""
    model = made(llama())
    model.model.layers[0].input_layernorm.weight.data[3] = 0
    plain = made(llama())
    data = [torch.full((1, 4), 5)]
    report = quantize_model(
        model,
        data,
        TorchConfig(UINT4, exclude=("lm_head",), algorithms="gptq"),
        progress=False,
    )
    assert all(each.after <= each.before for each in report.outcomes)
    error = (logits(model, data[0]) - logits(plain, data[0])).abs().max()
    assert float(error) < 0.2 * float(logits(plain, data[0]).abs().max())


@pytest.mark.parametrize("name", ["gptq", "clip", "autoround:steps=2"])
def test_inputs_that_are_no_numbers_are_named(name: str) -> None:
    model = made(llama())
    model.model.layers[1].input_layernorm.weight.data[3] = float("inf")
    with pytest.raises(
        DataError,
        match=r"what model.layers.1\S* (reads|computes) is infinite or no number",
    ):
        quantize_model(
            model,
            tokens(1),
            TorchConfig(UINT4, exclude=("lm_head",), algorithms=name),
            progress=False,
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"damping": -1}, "damping of gptq is -1; it must be a number from 0"),
        ({"damping": float("nan")}, "damping of gptq is nan"),
        ({"act_order": 1}, "act_order of gptq is 1; it must be true or false"),
        (
            {"coordinate_descent_passes": 1.5},
            "coordinate_descent_passes of gptq is 1.5; it must be a whole number",
        ),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPTQ(**settings)


def test_names_and_order() -> None:
    assert algorithm("gptaq:alpha=1") == GPTAQ(alpha=1)
    with pytest.raises(
        ConfigError, match=r"unknown algorithm 'gtpq'.*did you mean 'gptq'"
    ):
        algorithm("gtpq")
    with pytest.raises(
        ConfigError, match="alpha of gptaq is 2; it must be a number from 0 to 1"
    ):
        algorithm("gptaq:alpha=2")
    with pytest.raises(ConfigError, match="dampening"):
        algorithm("gptq:dampening=2")
    with pytest.raises(ConfigError, match="it must be an algorithm"):
        TorchConfig(UINT4, algorithms=(GPTQ,))


def test_what_algorithms_do_not_touch_is_told(tmp_path: Path) -> None:
    mxfp4 = TorchConfig(
        scheme("mxfp4_weight_only"), exclude=("lm_head",), algorithms="clip"
    )
    nothing = TorchConfig(
        LayerSpec(None, scheme("fp8").input), exclude=("lm_head",), algorithms="gptq"
    )
    for config, name in ((mxfp4, "clip"), (nothing, "gptq")):
        report = quantize_model(made(llama()), tokens(1), config, progress=False)
        assert report.outcomes == []
        assert [note.split(":")[0] for note in report.notes] == [
            f"{name} has changed nothing"
        ]
    whole = TorchConfig(UINT4, algorithms="gptq")
    source = saved(made(llama(tie_word_embeddings=False)), tmp_path / "model")
    for report in (
        quantize_model(made(llama()), tokens(1), whole, progress=False),
        quantize_checkpoint(source, tokens(1), whole, tmp_path / "out", progress=False),
    ):
        assert report.notes == [
            "lm_head lies outside of the blocks that gptq works on: it is rounded to the nearest"
        ]


def test_data_and_blocks_are_needed() -> None:
    config = TorchConfig(UINT4, algorithms="gptq")
    with pytest.raises(
        DataError,
        match="an algorithm learns from data, but no calibration data was given",
    ):
        quantize_model(made(llama()), None, config, progress=False)
    with pytest.raises(
        ModelError, match="gptq works block by block: the model has no list of blocks"
    ):
        quantize_model(
            nn.Sequential(nn.Linear(32, 4)), [torch.ones(1, 32)], config, progress=False
        )
    bare = nn.Module()
    bare.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
    with pytest.raises(
        ModelError, match=r"gptq works block by block: layers\.0 is a Linear alone"
    ):
        quantize_model(bare, [torch.ones(1, 32)], config, progress=False)
