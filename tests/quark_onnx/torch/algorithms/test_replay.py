"""Replays of blocks: what they compute is what whole runs compute, to the bit, and no layer is run
twice.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from quark_onnx.torch.algorithms.base import BlockJob
from quark_onnx.torch.algorithms.gptq.gptq import GPTQ
from quark_onnx.torch.algorithms.scheduling import replay
from quark_onnx.torch.algorithms.scheduling.stages import stages_of
from quark_onnx.torch.calibration.block_stream import BlockArguments
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests import torch_families
from tests.torch_models import logits, made, tokens

UINT4 = LayerSpec(TensorSpec("uint4", symmetric=False, block_size=32))


def outcome(family: str, name: str, layer: LayerSpec) -> tuple[Any, Any]:
    model = made(torch_families.config_of(family))
    config = TorchConfig(
        layer, exclude=(torch_families.head_of(family),), algorithms=(name,)
    )
    report = quantize_model(model, tokens(4), config, progress=False)
    return logits(model, tokens(1)[0]), report.outcomes


@pytest.mark.parametrize("name", ["gptq", "gptaq"])
@pytest.mark.parametrize(
    "family", ["llama3", "gptj", "gpt2", "phi3", "mixtral", "gemma2"]
)
def test_what_is_kept_changes_no_bit(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All samples, none, and some of them."""
    layer = scheme("int8") if family == "llama3" else UINT4
    found = []
    for least in (1 << 26, 10_000, 0):
        monkeypatch.setattr(replay, "LEAST", least)
        if not least:
            monkeypatch.setattr(
                replay.Replay,
                "limit",
                property(lambda self: 0, lambda self, limit: None),
                raising=False,
            )
        found.append(outcome(family, name, layer))
    for other in found[1:]:
        assert torch.equal(found[0][0], other[0]) and found[0][1] == other[1]


def test_no_layer_is_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Counter[str]()
    plain = QuantizedLayer.forward

    def counting(self: QuantizedLayer, *args: Any, **named: Any) -> Any:
        runs[str(self.shape)] += 1
        return plain(self, *args, **named)

    monkeypatch.setattr(QuantizedLayer, "forward", counting)
    model = made(torch_families.config_of("llama3"))
    config = TorchConfig(UINT4, exclude=("lm_head",), algorithms=("gptq",))
    quantize_model(model, tokens(4), config, progress=False)
    layers = [each for each in model.modules() if isinstance(each, QuantizedLayer)]
    assert sum(runs.values()) == 4 * len(layers)


def test_no_decoded_weights_are_held_while_columns_are_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replays, held = list[replay.Replay](), list[dict[str, Any]]()
    begin, group = replay.Replay.begin, GPTQ.quantize_group
    monkeypatch.setattr(
        replay.Replay,
        "begin",
        lambda self, place: (replays.append(self), begin(self, place))[1],
    )
    monkeypatch.setattr(
        GPTQ,
        "quantize_group",
        lambda self, *args: (held.append(replays[-1].decoded), group(self, *args))[1],
    )
    model = made(torch_families.config_of("llama3"))
    quantize_model(
        model,
        tokens(4),
        TorchConfig(UINT4, exclude=("lm_head",), algorithms=("gptq",)),
        progress=False,
    )
    assert held and not any(held)


class Hidden(nn.Module):
    """A block in which the graph of gradients does not show all that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Any) -> Any:
        first = self.one(x)
        return self.three(torch.tanh(self.two(torch.tanh(first)))) + first.detach()


class Asking(Hidden):
    """A block that looks at numbers of a layer which the graph of gradients does not show to be
    read.
    """

    def forward(self, x: Any) -> Any:
        first = self.one(x)
        hidden = self.three(torch.tanh(self.two(torch.tanh(first))))
        hidden.detach().add_(first.detach())
        return hidden + float(first.detach().mean())


class Placing(Hidden):
    """A block that makes tensors for the device of a layer's result, and keeps one while the device
    is the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.kept = nn.Embedding(8, 32), torch.ones(32)

    def forward(self, x: Any) -> Any:
        first = self.one(x)
        hidden = self.two(torch.tanh(first))
        if self.kept.device != first.device:
            self.kept = self.kept.to(first.device)
        places = torch.arange(x.shape[1], device=first.device)
        return (
            self.three(
                torch.tanh(hidden[:, places])
                + torch.tanh(self.table(places)) * self.kept
            )
            + first.detach()
        )


@pytest.mark.parametrize("kind", [Hidden, Asking, Placing])
def test_what_is_read_unseen_is_computed_all_the_same(kind: type[Hidden]) -> None:
    torch.manual_seed(0)
    block = kind()
    calls = [BlockArguments(torch.randn(1, 8, 32)) for _ in range(3)]
    layers = {
        f"0.{name}": (each, UINT4)
        for name, each in block.named_children()
        if isinstance(each, nn.Linear)
    }
    job = BlockJob("0", block, layers, calls, calls)
    assert stages_of(block, job.layers, calls[0])[0].until == {"0.one": 1}
    start = {
        name: quantize(weight, spec.weight)
        for name, weight, spec in job.weights()
        if spec.weight
    }
    with torch.no_grad():
        codes, _ = GPTQ()(job, start)
        found = [job.replay.result(index, call) for index, call in enumerate(calls)]
        with job.put(job.quantized(codes)):
            assert all(
                torch.equal(one, call.run(block))
                for one, call in zip(found, calls, strict=True)
            )
    assert all("forward" not in vars(each) for each in block.children())
