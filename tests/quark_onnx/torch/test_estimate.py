"""Estimates of memory, disk and time, compared with those of runs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from quark_onnx.common.registry import ALGORITHMS
from quark_onnx.kernels.hqq import half_quadratic
from quark_onnx.torch.algorithms.cost import (
    Cost,
    Shapes,
    cost_of,
    evaluation_cost,
)
from quark_onnx.torch.algorithms.gptq.hessian import largest_stage
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import layout_named
from quark_onnx.torch.checkpoints.safetensors_io import Reader
from quark_onnx.torch.config.algorithm_order import algorithm
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import Attention, TorchConfig
from quark_onnx.torch.pipelines.estimate import Estimate, Speed, estimate, shapes_of
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import chosen_layers
from quark_onnx.torch.pipelines.ptq import Text, ptq
from quark_onnx.torch.pipelines.tensor_files import size_of_files
from quark_onnx.torch.pipelines.written_size import written_bytes
from tests import torch_families
from tests.torch_models import llama, made, saved, tokens


def said(source: Path, config: TorchConfig, count: int = 0) -> Estimate:
    opened = FloatCheckpoint(source)
    return estimated(opened, config, count)


def estimated(
    source: FloatCheckpoint, config: TorchConfig, count: int, **settings: Any
) -> Estimate:
    """Return the estimate of a run that writes the layout of AMD Quark."""
    chosen = chosen_layers(source.model, config)[0]
    disk = written_bytes(source, config, layout_named("quark"))
    return estimate(source, chosen, count, disk=disk, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["uint4_wo_32", "int3_wo_32", "fp8", "int8", "mxfp4", "mxfp6_e2m3", "nvfp4"]
)
def test_disk(name: str, dtype: Any, tmp_path: Path) -> None:
    source = saved(
        made(llama(hidden_size=128, intermediate_size=512), dtype), tmp_path / "source"
    )
    config = TorchConfig(scheme(name), exclude=("lm_head",))
    found = said(source, config)
    quantize_checkpoint(source, tokens(), config, tmp_path / "out", progress=False)
    size = size_of_files(Reader(tmp_path / "out"))
    # the header is padded to eight bytes, and its offsets have other digits in another order
    assert found.disk == pytest.approx(size, abs=256)


def test_the_size_is_that_of_the_layout(tmp_path: Path) -> None:
    """Each layout has its own names, scales and packing, and tied heads are stored once."""
    config = llama(hidden_size=128, intermediate_size=512, tie_word_embeddings=True)
    source = saved(made(config), tmp_path / "source")
    np.save(tmp_path / "tokens.npy", np.arange(512).reshape(8, 64) % 96)
    scheme_config = TorchConfig(scheme("uint4_wo_32"), exclude=("lm_head",))
    for layout in ("quark", "compressed-tensors", "awq"):
        output = tmp_path / layout
        found = ptq(
            source,
            None,
            scheme_config,
            output,
            writing=Writing(layout=layout),
            progress=False,
        )
        size = size_of_files(Reader(output))
        assert found.estimate.disk == pytest.approx(size, abs=256), layout


MEASURED = """
import json, sys, torch
from pathlib import Path
from types import SimpleNamespace
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.runtime.memory import resident
from quark_onnx.torch.pipelines.ptq import Text, config_for, ptq
source, output, data, scheme, *algorithms = sys.argv[1:]
source = FloatCheckpoint(source)
assert source.model is not None
before = resident()
config = config_for(scheme).with_(algorithms=tuple(algorithms))
found = ptq(source, Text(data, 2, 64), config, output, progress=False)
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
print(json.dumps([found.estimate.memory - before, peak - before]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak is read from /proc"
)
@pytest.mark.parametrize("name", ["uint4_wo_128", "fp8", "mxfp4"])
def test_memory(name: str, tmp_path: Path) -> None:
    """Beyond what the process has before: 30 million weights in a block, 15 million in a matrix."""
    expected, taken = peak(
        tmp_path,
        {"hidden_size": 1024, "intermediate_size": 12288, "vocab_size": 8000},
        name,
    )
    assert taken > 40 << 20 and expected / 2 < taken < expected * 2


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak is read from /proc"
)
@pytest.mark.parametrize(
    "algorithm",
    ["gptq", "qronos", "awq", "autoround:steps=1", "distill:steps=1,sequences=2"],
)
def test_memory_of_algorithms(algorithm: str, tmp_path: Path) -> None:
    expected, taken = peak(
        tmp_path,
        {"hidden_size": 1024, "intermediate_size": 2048},
        "uint4_wo_128",
        algorithm,
    )
    assert taken > 40 << 20 and expected / 3 < taken < expected * 3


def peak(folder: Path, settings: dict[str, Any], *arguments: str) -> tuple[int, int]:
    """Return the estimated and the measured bytes of a run in a separate process."""
    import numpy as np

    source = saved(
        made(llama(num_hidden_layers=1, dtype="bfloat16", **settings), torch.bfloat16),
        folder / "source",
    )
    np.save(folder / "tokens.npy", np.arange(128).reshape(2, 64) % 96)
    command = [
        sys.executable,
        "-c",
        MEASURED,
        str(source),
        str(folder / "out"),
        str(folder / "tokens.npy"),
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected, taken = json.loads(done.stdout.splitlines()[-1])
    return expected, taken


class WorkClock(TorchDispatchMode):
    """A clock that counts the work of torch operators. The load of the machine does not change it.

    A call takes 2 us, a value 1 ns, and a multiply-accumulate of a product 0.05 ns. NumPy's
    universal functions count where an input is ``counted_array``; other code takes no time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.now += 2e-6
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.now += value.numel() * 1e-9
        operations = flop_registry.get(func.overloadpacket)
        if operations is not None:
            flops = operations(*args, **(kwargs or {}), out_val=result)
            self.now += flops / 2 * 0.05e-9
        return result

    def perf_counter(self) -> float:
        return self.now

    thread_time = perf_counter

    def counted_array(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return an array whose universal functions, and those of their results, count."""
        clock = self

        class Counted(np.ndarray[Any, Any]):
            def __array_ufunc__(
                self, ufunc: Any, method: str, *inputs: Any, **settings: Any
            ) -> Any:
                plain = [np.asarray(each) for each in inputs]
                if "out" in settings:
                    settings["out"] = tuple(map(np.asarray, settings["out"]))
                result = getattr(ufunc, method)(*plain, **settings)
                clock.now += 2e-6 + max(each.size for each in plain) * 1e-9
                return np.asarray(result).view(Counted)

        return values.view(Counted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        "gptq",
        "gptaq",
        "qronos",
        "clip",
        "awq:clip=false",
        "autosmoothquant",
        "hqq",
        "autoround:steps=10",
    ],
)
def test_time_of_algorithms(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a factor of two, by a clock that counts the work of the probes and of the run."""
    source = saved(
        made(llama(hidden_size=256, intermediate_size=768, num_hidden_layers=1)),
        tmp_path / "source",
    )
    opened = FloatCheckpoint(source)
    config = TorchConfig(
        scheme("uint4_wo_32"), exclude=("lm_head",), algorithms=(algorithm,)
    )
    with WorkClock() as clock:
        monkeypatch.setattr("quark_onnx.torch.pipelines.estimate.time", clock)
        expected = estimated(
            opened,
            config,
            8 * 64,
            samples=8,
            algorithms=config.algorithms,
            speed=Reading(opened),
        ).seconds
    with WorkClock() as clock:
        # HQQ solves in NumPy
        monkeypatch.setattr(
            "quark_onnx.torch.algorithms.hqq.half_quadratic",
            lambda values, *others: half_quadratic(
                clock.counted_array(values), *others
            ),
        )
        quantize_checkpoint(
            opened, tokens(8, 64), config, tmp_path / "out", progress=False
        )
    assert expected / 2 < clock.now < expected * 2


def counted(model: Any, length: int) -> int:
    """Multiply-accumulates of a model on a window, as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, length, dtype=torch.long))
    return int(counter.get_total_flops()) // 2


@pytest.mark.parametrize("length", [16, 64])
@pytest.mark.parametrize("evaluated", [1, 3])
def test_products_of_an_evaluation(length: int, evaluated: int, tmp_path: Path) -> None:
    """Blocks, attention and head, of both models and each window; norms are in the blocks."""
    model = made(llama(hidden_size=64, intermediate_size=160, num_hidden_layers=3))
    model.set_attn_implementation("eager")
    source = FloatCheckpoint(saved(model, tmp_path / "source"))
    config = TorchConfig(scheme("uint4_wo_32"), exclude=("lm_head",))
    shapes = shapes_of(source.model, chosen_layers(source.model, config)[0], 0, 0)
    found = evaluation_cost(shapes, [length] * evaluated)
    expected = 2 * evaluated * counted(model, length)
    assert found.products == pytest.approx(expected, rel=0.01)
    assert found.operators == evaluated * evaluation_cost(shapes, [length]).operators


def test_products_of_a_calibration(tmp_path: Path) -> None:
    """The blocks with attention, on each sample, without the head."""
    model = made(llama(hidden_size=64, intermediate_size=160, num_hidden_layers=3))
    model.set_attn_implementation("eager")
    source = FloatCheckpoint(saved(model, tmp_path / "source"))
    config = TorchConfig(scheme("fp8"), exclude=("lm_head",))
    shapes = shapes_of(source.model, chosen_layers(source.model, config)[0], 5 * 64, 5)
    expected = 5 * (counted(model, 64) - 64 * model.lm_head.weight.numel())
    assert shapes.runs(1).products == pytest.approx(expected, rel=0.01)
    assert shapes.batches == 1
    assert replace(shapes, samples=20, tokens=20 * 64).batches == 3  # of 8 samples
    twice = replace(shapes, samples=10, tokens=10 * 64).runs(1)
    assert twice.products == 2 * shapes.runs(1).products


def test_products_of_a_mixture(tmp_path: Path) -> None:
    """Only the chosen experts run on a token: two of four in each block."""
    model = made(torch_families.config_of("mixtral"))
    source = FloatCheckpoint(saved(model, tmp_path / "source"))
    config = TorchConfig(scheme("fp8"), exclude=("lm_head",))
    chosen = chosen_layers(source.model, config)[0]
    shapes = shapes_of(source.model, chosen, 5 * 64, 5)
    experts = [name for name in shapes.layers if ".experts." in name]
    active = source.model.config.num_experts_per_tok
    count = source.model.config.num_local_experts
    assert set(shapes.shares.values()) == {active / count}
    sizes = {
        name: outputs * inputs for name, (outputs, inputs) in shapes.layers.items()
    }
    blocks = source.model.model.layers.parameters()
    dense = sum(each.numel() for each in blocks) - sum(map(sizes.get, experts))
    routed = sum(map(sizes.get, experts)) * active / count
    assert shapes.active == dense + routed
    everywhere = replace(shapes, shares={})
    inputs = [shapes.layers[name][1] ** 2 for name in experts]
    # gate and up projection have a common Hessian
    inputs = [
        each for each, name in zip(inputs, experts, strict=True) if "up_" not in name
    ]
    less = sum(inputs) * (1 - active / count) * shapes.tokens
    assert everywhere.hessians - shapes.hessians == pytest.approx(less)


class Instant(Speed):
    """A machine that reads and rounds in no time."""

    def reading(self) -> float:
        return 1e18

    def roundings(self, spec: Any, dtype: Any) -> float:
        return 1e18


def test_hidden_states_of_a_multimodal_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hidden_size stands in text_config, and nowhere else."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    model = importlib.import_module("_tiny_models").tiny_model("llava")
    source = FloatCheckpoint(saved(model, tmp_path / "source"))
    config = TorchConfig(scheme("fp8"), exclude=source.usually_float())
    speed = Instant(source)
    few, many = (
        estimated(source, config, count, samples=count, speed=speed).memory
        for count in (1 << 22, 1 << 23)
    )
    width = source.model.config.text_config.hidden_size
    value = next(source.model.parameters()).dtype.itemsize
    assert many - few == pytest.approx((1 << 22) * width * value, rel=0.1)


def test_a_model_whose_text_config_is_null(tmp_path: Path) -> None:
    """Its own sizes count, also for quantized probabilities."""
    folder = saved(made(llama()), tmp_path / "source")
    config = TorchConfig(
        LayerSpec(), attention=Attention(TensorSpec("fp8e4m3"), TensorSpec("fp8e4m3"))
    )
    found = list[int]()
    for change in ({}, {"text_config": None}):
        path = folder / "config.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(content | change), encoding="utf-8")
        source = FloatCheckpoint(folder)
        speed = Instant(source)
        found.append(estimated(source, config, 4096, samples=8, speed=speed).memory)
    # probabilities take 16 MB at least; the process itself takes more now and then
    assert abs(found[0] - found[1]) < 8 << 20


def test_writing_takes_time_where_reading_takes_none(tmp_path: Path) -> None:
    """As of files in memory: each tensor is written twice, at one GB per second at most."""
    opened = FloatCheckpoint(saved(made(llama()), tmp_path / "source"))
    config = TorchConfig(scheme("uint4_wo_32"), exclude=("lm_head",))
    found = estimated(opened, config, 0, speed=Instant(opened))
    assert found.seconds == pytest.approx(2 * found.disk / 1e9)


def test_the_verdict_and_the_evaluation_count(tmp_path: Path) -> None:
    source = saved(made(llama()), tmp_path / "source")
    np.save(tmp_path / "tokens.npy", np.arange(512).reshape(8, 64) % 96)
    text = Text(str(tmp_path / "tokens.npy"), 8, 64)
    config = TorchConfig(scheme("fp8"), exclude=("lm_head",))
    evaluated = []
    for place, (verdict, evaluate) in enumerate(
        [(False, None), (True, None), (True, text)]
    ):
        found = ptq(
            source,
            text,
            config,
            tmp_path / f"out{place}",
            evaluate=evaluate,
            progress=False,
            verdict=verdict,
        )
        evaluated.append(found.estimate.evaluated)
    # the last window of the text, then all of it for the verdict and for the perplexity
    assert evaluated == [0, 64, 8 * 64 + 8 * 64]


def test_what_algorithms_take_grows_with_their_settings() -> None:
    layers = {
        f"m.{block}.{name}": (64, 32)
        for block in range(2)
        for name in ("attn.q", "attn.k", "mlp.up")
    }
    layers |= {f"m.{block}.mlp.down": (32, 64) for block in range(2)}
    shapes = Shapes(layers, 5 * 10**4, 10**5, 1000, 10)
    assert shapes.groups == {
        (f"m.{block}.{parent}", size): outputs
        for block in range(2)
        for parent, size, outputs in (
            ("attn", 32, 2 * 64),
            ("mlp", 32, 64),
            ("mlp", 64, 32),
        )
    }
    assert largest_stage(shapes) == 64**2
    experts = {f"m.0.experts.{expert}.up": (64, 32) for expert in range(8)}
    assert largest_stage(Shapes(experts, 1, 1, 1, 1)) == 8 * 32**2  # one stage

    def cost(text: str) -> Cost:
        return cost_of((algorithm(text),), shapes)[0]

    pairs = [
        ("gptq", "qronos"),
        ("gptq:search_scales=false", "gptq"),
        ("gptq", "gptq:coordinate_descent_passes=3"),
        ("awq", "awq:duo=true"),
    ]
    pairs += [
        ("autoround:steps=10", "autoround:steps=20"),
        ("smoothquant", "autosmoothquant"),
        ("hqq", "gptq"),
    ]
    for less, more in pairs:
        assert (
            cost(less).products + cost(less).roundings
            < cost(more).products + cost(more).roundings
        )
    assert cost("qronos").memory - cost("gptq").memory == 4 * largest_stage(shapes)
    both, _ = cost_of((algorithm("awq"), algorithm("gptq")), shapes)
    assert both.memory == max(cost("awq").memory, cost("gptq").memory)
    assert both.products == cost("awq").products + cost("gptq").products


def test_every_algorithm_is_known() -> None:
    shapes = Shapes({"m.0.q": (32, 32)}, 1024, 4096, 10, 1)
    for name in ALGORITHMS:
        cost, unknown = cost_of((ALGORITHMS[name](),), shapes)
        assert not unknown and cost != Cost(), name
    assert cost_of((SimpleNamespace(name="mine"),), shapes) == (Cost(), ("mine",))
    assert str(Estimate(1 << 20, 1 << 20, 5.0, ("mine",))).endswith(
        "5 s, and what mine takes"
    )


def test_a_size_is_said_in_its_unit() -> None:
    assert (
        str(Estimate(1 << 20, 5 << 30, 5.0))
        == "about 1 MiB of memory, 5.0 GiB of disk, 5 s"
    )
    assert str(Estimate(0, 0, 3 * 3600.0)).endswith("3.0 h")


class Clock:
    """Clocks that advance by a millisecond at each reading, except for interruptions.

    Args:
        interrupted: at every such reading, another program runs for five seconds; 0 for never.
    """

    def __init__(self, interrupted: int) -> None:
        self.interrupted = interrupted
        self.readings = 0
        self.now = 0.0

    def perf_counter(self) -> float:
        self.readings += 1
        self.now += 1e-3
        if self.interrupted and self.readings % self.interrupted == 0:
            self.now += 5.0
        return self.now

    def thread_time(self) -> float:
        self.now += 1e-3
        return self.now


class Reading(Speed):
    """A machine of known speed of reading.

    Waits for a processor are subtracted from reads by the system's own clock, which has no part in
    a test with other clocks.
    """

    def reading(self) -> float:
        return 1e9


def test_other_programs_change_no_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FloatCheckpoint(
        saved(
            made(llama(hidden_size=64, intermediate_size=160, vocab_size=9000)),
            tmp_path / "source",
        )
    )
    config = TorchConfig(
        scheme("uint4_wo_32"), exclude=("lm_head",), algorithms=("gptq",)
    )
    found = []
    for interrupted in (0, 3, 7):
        monkeypatch.setattr(
            "quark_onnx.torch.pipelines.estimate.time", Clock(interrupted)
        )
        found.append(
            estimated(
                source,
                config,
                8 * 64,
                samples=8,
                algorithms=config.algorithms,
                evaluated=[64],
                speed=Reading(source),
            ).seconds
        )
    assert found == pytest.approx([found[0]] * 3, rel=0.01)


def test_a_long_run_names_shorter_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option has its runtime. Options that save little time are not named."""
    source = saved(made(llama(max_position_embeddings=512)), tmp_path / "source")
    np.save(tmp_path / "tokens.npy", np.arange(80 * 512).reshape(80, 512) % 96)
    config = TorchConfig(
        scheme("uint4_wo_32"), exclude=("lm_head",), algorithms=("gptq",)
    )
    announced = list[Estimate]()

    class AnnouncedError(Exception):
        pass

    def announce(expected: Estimate) -> None:
        announced.append(expected)
        raise AnnouncedError

    class Slow(Clock):
        """A second for each reading."""

        def perf_counter(self) -> float:
            self.now += 1.0
            return self.now

        thread_time = perf_counter

    for clock, count in ((Slow(0), 80), (Slow(0), 16), (Clock(0), 80)):
        monkeypatch.setattr("quark_onnx.torch.pipelines.estimate.time", clock)
        with pytest.raises(AnnouncedError):
            ptq(
                source,
                Text(str(tmp_path / "tokens.npy"), count, 512),
                config,
                tmp_path / "out",
                progress=False,
                announce=announce,
            )
    many, few, fast = announced
    options = [option for option, _ in many.shorter]
    assert options[:2] == ["--samples 32", "--length 256"]
    assert options[2].startswith("without --algorithm")
    assert all(seconds < many.seconds for _, seconds in many.shorter)
    assert not any(option.startswith("--samples") for option, _ in few.shorter)
    assert fast.shorter == ()
