"""Which layers of a model are quantized: linear ones by what they compute, routers and unknown
stacks never.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.exports.gguf import write_gguf
from quark_onnx.torch.exports.kinds import exported
from quark_onnx.torch.models.experts import UNFUSED, ParallelExperts, unfuse_experts
from quark_onnx.torch.models.mixtures import routers_of
from quark_onnx.torch.models.quantized_layer import QuantizedLayer, kind_of
from quark_onnx.torch.pipelines import ptq as torch_ptq
from quark_onnx.torch.pipelines.file_to_file import quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.pipelines.mixed_precision import mix
from tests.torch_models import VOCABULARY, llama, logits, made, saved, tokens

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_DBRX = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
}
FALCON = {**_SIZES, "ffn_hidden_size": 96}
JETMOE = {**_SIZES, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
#: By model type: settings, and the ends of the names of modules that choose among experts.
MIXTURES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "mixtral": ({"num_local_experts": 4}, {"mlp.gate"}),
    "qwen2_moe": (
        {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
        {"mlp.gate", "mlp.shared_expert_gate"},
    ),
    "qwen3_moe": ({**_EXPERTS, "num_experts": 4}, {"mlp.gate"}),
    "deepseek_v2": ({**_EXPERTS, **_LATENT}, {"mlp.gate"}),
    "deepseek_v3": ({**_EXPERTS, **_LATENT}, {"mlp.gate"}),
    "gpt_oss": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        {"mlp.router"},
    ),
    "granitemoe": (
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"block_sparse_moe.router"},
    ),
    "olmoe": ({"num_experts": 4, "num_experts_per_tok": 2}, {"mlp.gate"}),
    "phimoe": ({"num_local_experts": 4, "num_experts_per_tok": 2}, {"mlp.router"}),
    "llama4_text": (
        {"num_local_experts": 4, "moe_layers": [0, 1], "head_dim": 16},
        {"feed_forward.router"},
    ),
    "dbrx": (_DBRX, {"ffn.router.layer"}),
    "afmoe": (
        {
            **_EXPERTS,
            "num_experts": 4,
            "num_dense_layers": 0,
            "num_shared_experts": 1,
            "head_dim": 16,
        },
        {"mlp.router.gate"},
    ),
    "hunyuan_v1_moe": (
        {"num_experts": 4, "moe_topk": 2, "head_dim": 16},
        {"mlp.gate.wg"},
    ),
    "jetmoe": (JETMOE, {"mlp.router.layer", "self_attention.experts.router.layer"}),
}


def mixture_of(kind: str) -> Any:
    settings = MIXTURES[kind][0]
    return made(
        AutoConfig.for_model(
            kind, **(settings if kind == "dbrx" else {**_SIZES, **settings})
        )
    )


def ends(names: list[str]) -> set[str]:
    """The names without what comes before a block and its number."""
    return {
        name.split("layers.")[-1].split("blocks.")[-1].partition(".")[2]
        for name in names
    }


class _Product(nn.Linear):
    def forward(self, hidden: Any) -> Any:
        found = hidden @ self.weight.T
        return found if self.bias is None else found + self.bias


class _Doubled(nn.Linear):
    def forward(self, input: Any) -> Any:
        return 2 * super().forward(input)


class _Clamped(nn.Linear):
    def forward(self, input: Any) -> Any:
        return F.linear(input.clamp(-50, 50), self.weight, self.bias)


class _Normed(nn.Linear):
    def forward(self, input: Any) -> Any:
        return F.linear(input, self.weight / self.weight.norm(), self.bias)


class _Grouped(nn.Linear):
    def forward(self, input: Any) -> Any:
        parts = zip(
            input.chunk(2, -1),
            self.weight.view(2, -1, self.weight.shape[1]),
            strict=True,
        )
        return torch.cat([part @ weight.t() for part, weight in parts], -1)


class _Both(nn.Linear):
    def forward(self, input: Any) -> Any:
        return super().forward(input), input


class _Adapter(nn.Linear):
    """Computes a plain product as long as its second matrix is zero, as it is before training."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.more = nn.Parameter(torch.zeros(outputs, inputs))

    def forward(self, input: Any) -> Any:
        return super().forward(input) + input @ self.more.t()


class _Scaled(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, input: Any) -> Any:
        return super().forward(input) * self.factor


class _Inherited(nn.Linear):
    pass


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("cls", "plain"),
    [
        (nn.Linear, True),
        (_Inherited, True),
        (_Product, True),
        (_Doubled, False),
        (_Clamped, False),
        (_Normed, False),
        (_Grouped, False),
        (_Both, False),
        (_Adapter, False),
        (_Scaled, False),
    ],
)
def test_subclasses_of_linear(cls: Any, plain: bool, device: str) -> None:
    """A subclass of Linear is quantized if and only if its forward is a plain matrix product, with
    memory or without; any other is named in the report with the reason.
    """
    with torch.device(device):
        layer = cls(64, 64)
    assert (kind_of(layer) == "Linear") == plain
    if device == "meta" or cls is _Both or cls is _Grouped:
        return
    model = nn.Sequential(layer, nn.Linear(64, 8))
    x = torch.randn(5, 64)
    report = quantize_model(
        model, None, TorchConfig(scheme("int8_per_channel")), progress=False
    )
    assert ("0" in report.quantized) == plain
    if not plain:
        assert (
            f"it is a {cls.__name__}, which computes something else" in report.kept["0"]
        )
    else:
        weight = layer.weight.detach().double()
        expected = x.double() @ weight.t() + layer.bias.detach().double()
        assert float((model[0](x).detach() - expected).norm() / expected.norm()) < 0.02


def test_a_layer_may_be_called_by_keyword() -> None:
    """A quantized layer takes its input under the name that the class of the float layer has for
    it.
    """

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([_Product(64, 64)])

        def forward(self, x: Any) -> Any:
            return self.layers[0](hidden=x)

    model, x = Net(), torch.randn(2, 3, 64)
    expected = model(x).detach()
    quantize_model(model, [x], TorchConfig(scheme("int8")), progress=False)
    assert 0 < float((model(x).detach() - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize(("kind", "settings"), [("falcon", FALCON), ("jetmoe", JETMOE)])
@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("fp8", ()), ("uint4_wo_32", ("gptq",)), ("mxfp4", ("awq",))],
)
def test_in_memory_and_from_file_to_file(
    kind: str,
    settings: dict[str, Any],
    name: str,
    algorithm: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """Every weight of the blocks but norms, biases and routers is quantized, in memory as from file
    to file; what is written loads again and computes the same.
    """
    model = made(AutoConfig.for_model(kind, **settings))
    source = saved(model, tmp_path / "source")
    before = logits(model, tokens()[0])
    config = TorchConfig(scheme(name), exclude=("lm_head",), algorithms=algorithm)
    report = quantize_model(model, tokens(6), config, progress=False)
    floats = [
        key
        for key, parameter in model.named_parameters()
        if parameter.ndim > 1 and ".layers." in key
    ]
    floats += [
        key
        for key, parameter in model.named_parameters()
        if parameter.ndim > 1 and ".h." in key
    ]
    assert (
        report.quantized
        and all("router" in key for key in floats)
        and bool(floats) == (kind == "jetmoe")
    )
    after = logits(model, tokens()[0])
    assert 1e-4 < float((after - before).norm() / before.norm()) < 1.0
    write_checkpoint(model, config, tmp_path / "memory")
    other = quantize_checkpoint(
        source, tokens(6), config, tmp_path / "files", progress=False
    )
    assert (other.kept, other.notes) == (report.kept, report.notes)
    for folder in ("memory", "files"):
        assert torch.equal(
            logits(load_checkpoint(tmp_path / folder), tokens()[0]), after
        )


@pytest.mark.parametrize("kind", MIXTURES)
def test_routers_stay_float(kind: str) -> None:
    """Whatever chooses among experts stays float in every family, and is named in the report."""
    model = mixture_of(kind)
    unfuse_experts(model)
    found = routers_of(model)
    assert ends(found) == MIXTURES[kind][1]
    report = quantize_model(
        model,
        None,
        TorchConfig(scheme("uint4_wo_32"), exclude=("lm_head",)),
        progress=False,
    )
    assert not any(
        "router" in name or name.endswith((".gate", ".wg")) for name in report.quantized
    )
    for name in found:
        assert "it chooses among experts" in (
            report.kept.get(name),
            report.kept.get(f"{name}.weight"),
        )
    assert any(
        "experts" in name or "_linear." in name for name in report.quantized
    ) == (kind != "dbrx")


class _Custom(nn.Module):
    """A mixture with names of its own; a stack of experts that nobody knows if ``stacked``."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.choose = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 3))
        self.before = nn.Linear(64, 64)
        if stacked:
            self.tables = nn.Module()
            self.tables.mixing = nn.Parameter(torch.randn(3, 64, 64))
        else:
            self.expert_list = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Any) -> Any:
        x = self.before(x)
        shares = self.choose(x).softmax(-1)
        if hasattr(self, "tables"):
            parts = torch.einsum("...i,noi->...no", x, self.tables.mixing)
        else:
            parts = torch.stack([expert(x) for expert in self.expert_list], -2)
        return (parts * shares[..., None]).sum(-2)


class _Net(nn.Module):
    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("stacked", [True, False])
def test_routers_and_stacks_with_other_names(stacked: bool) -> None:
    """A router is found by its outputs, one for each expert; a stack of experts that cannot be
    taken apart is named with its share of the weights.
    """
    model = _Net(_Custom(stacked), _Custom(stacked))
    report = quantize_model(model, None, TorchConfig(scheme("mxfp4")), progress=False)
    assert (
        report.kept["layers.0.choose.1"]
        == report.kept["layers.1.choose.1"]
        == "it chooses among experts"
    )
    assert "layers.0.before" in report.quantized
    if stacked:
        assert (
            "it is a stack of experts in a Module, which is not known"
            in report.kept["layers.0.tables.mixing"]
        )
        (note,) = report.notes
        assert note.startswith(
            "layers.0.tables.mixing and 1 more stack of experts stay float, 73 % of all weights"
        )
    else:
        assert not report.notes and "layers.1.expert_list.2" in report.quantized


class _Reversed(nn.Module):
    """A stack that looks like JetMoE's, and computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, inputs: Any, expert_size: Any) -> Any:
        parts = zip(inputs.split(expert_size), self.weight.flip(0), strict=True)
        return torch.cat([part @ weight.t() for part, weight in parts])


def test_stacks_are_taken_apart_by_what_they_compute() -> None:
    """A stack of a single weight becomes a layer for each expert only if it computes what these
    compute.
    """
    model = nn.Sequential(_Reversed())
    assert unfuse_experts(model) == 0 and not isinstance(model[0], ParallelExperts)
    model = mixture_of("jetmoe")
    before = logits(model, tokens()[0])
    assert unfuse_experts(model) == 8
    assert torch.equal(logits(model, tokens()[0]), before)


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_stacked_again(kind: str) -> None:
    """Each stack that was taken apart gives the tensors that it was made of."""
    model = mixture_of(kind)
    before = dict(model.named_parameters())
    unfuse_experts(model)
    for name, module in model.named_modules():
        if isinstance(module, UNFUSED):
            stacked = module.stacked_parameters()
            assert stacked.keys() == {
                key.rpartition(".")[2]
                for key in before
                if key.rpartition(".")[0] == name
            }
            for key, value in stacked.items():
                assert torch.equal(value, before[f"{name}.{key}"])


class _WithoutGate(nn.Module):
    """Experts with a single product before the activation, which is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(3, 4, 5))
        self.down_proj = nn.Parameter(torch.randn(3, 5, 4))
        self.act_fn = nn.ReLU()

    def forward(self, x: Any, indices: Any, shares: Any) -> Any:
        raise NotImplementedError


def test_experts_without_a_gate_are_stacked_again() -> None:
    model = nn.Sequential(_WithoutGate())
    before = dict(model[0].named_parameters())
    assert unfuse_experts(model) == 1
    stacked = model[0].stacked_parameters()
    assert stacked.keys() == before.keys()
    assert all(torch.equal(stacked[name], before[name]) for name in before)


def _whole(model: Any, source: Path, output: Path, config: TorchConfig) -> None:
    quantize_model(model, None, config, progress=False)


def _files(model: Any, source: Path, output: Path, config: TorchConfig) -> None:
    quantize_checkpoint(source, None, config, output, progress=False)


def _ptq(model: Any, source: Path, output: Path, config: TorchConfig) -> None:
    torch_ptq.ptq(source, None, config, output, progress=False)


def _gguf(model: Any, source: Path, output: Path, config: TorchConfig) -> None:
    with exported(["gguf"], FloatCheckpoint(source), config, output, []):
        raise AssertionError("nothing is to be done")


def _mixed(model: Any, source: Path, output: Path, config: TorchConfig) -> None:
    mix(model, tokens(), ["mxfp4", "fp8"], 5.0, config=config, progress=False)


@pytest.mark.parametrize("run", [_whole, _files, _ptq, _gguf, _mixed])
def test_nothing_quantized_is_an_error(run: Any, tmp_path: Path) -> None:
    """A run that would quantize no layer is an error that says why each stays float.

    Nothing is written.
    """
    model = made(llama())
    source = saved(model, tmp_path / "source")
    before = logits(model, tokens()[0])
    config = TorchConfig(
        scheme("fp8").with_(input=None), exclude=("*layers*", "lm_head")
    )
    with pytest.raises(
        ConfigError,
        match=r"no layer would be quantized; model\.embed_tokens: nothing asks for it; ",
    ):
        run(model, source, tmp_path / "out", config)
    assert torch.equal(logits(model, tokens()[0]), before)
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def test_a_gguf_file_without_blocks_is_an_error(tmp_path: Path) -> None:
    """A GGUF file of a kind with blocks of which no tensor has any is an error.

    Nothing is written.
    """
    settings = {"hidden_size": 48, "intermediate_size": 80, "head_dim": 12}
    source = saved(made(llama(**settings)), tmp_path / "source")
    with pytest.raises(
        ConfigError,
        match=r"no tensor would be Q4_1: F16, not Q4_1: a width of 80 is no multiple of 32",
    ):
        write_gguf(source, tmp_path / "model.gguf", "q4_1")
    assert [each.name for each in tmp_path.iterdir()] == ["source"]
    write_gguf(source, tmp_path / "model.gguf", "f16")


def test_reasons_are_those_of_each_layer() -> None:
    """Each layer with a weight that stays float is named with its own reason, within blocks and
    outside.
    """
    model = _Net(nn.Sequential(nn.Linear(64, 64), nn.Conv1d(4, 4, 1)))
    model.head = nn.Linear(64, 8)
    model.table = nn.Embedding(8, 64)
    model.curve = nn.Parameter(torch.randn(4, 4))
    report = quantize_model(
        model, None, TorchConfig(scheme("mxfp4"), exclude=("head",)), progress=False
    )
    assert isinstance(model.layers[0][0], QuantizedLayer) and list(
        report.quantized
    ) == ["layers.0.0"]
    assert report.kept == {
        "head": "excluded",
        "table": "nothing asks for it",
        "layers.0.1.weight": "it is a weight of Conv1d, which is no layer that can be quantized",
        "curve": "it is a weight of _Net, which is no layer that can be quantized",
    }
