"""quantize_graph: against quantize_model of the same model, against a computation by hand, and
onnxruntime.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn
from torch.nn import functional as F
from torch.nn.utils import fuse_conv_bn_eval

from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.torch import ModelQuantizer, save_params
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import KVCache, TorchConfig
from quark_onnx.torch.models.float_weights import TOO_NARROW
from quark_onnx.torch.models.quantized_layer import QuantizedLayer, Rounding
from quark_onnx.torch.pipelines.graph.calls import fold_batch_norms, layers_of_graph
from quark_onnx.torch.pipelines.graph.quantize_graph import quantize_graph
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.quantization import Int8PerTensorSpec, QConfig, QLayerConfig
from tests.torch_models import llama, logits, made, tokens

INT8 = TensorSpec("int8")
BOTH = LayerSpec(INT8, INT8)


class Kinds(nn.Module):
    """All kinds of layers; one layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.same = nn.Conv2d(8, 8, 3, padding="same", dilation=2, bias=False)
        self.around = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")
        self.up = nn.ConvTranspose2d(
            8, 4, 3, stride=2, padding=1, output_padding=1, groups=2
        )
        self.relu = nn.ReLU(inplace=True)
        self.inner = nn.Sequential(
            nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16, bias=False)
        )
        self.twice = nn.Linear(16, 16)
        self.table = nn.Embedding(9, 16, padding_idx=0)

    def forward(self, x: Any, ids: Any) -> Any:
        x = self.relu(self.conv(x))
        x = self.up(self.around(F.relu6(self.same(x))))
        return (
            self.twice(torch.tanh(self.twice(self.inner(x.mean(1)))))
            + self.table(ids)[:, None]
        )


class Residual(nn.Module):
    """conv-bn-relu, another convolution added to it, a pool, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.side = nn.Conv2d(4, 4, 1, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(64, 5)

    def forward(self, x: Any) -> Any:
        x = self.relu(self.bn(self.conv(x)))
        return self.fc(self.pool(x + self.side(x)).flatten(1))


def seeded(kind: Any, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    model = kind().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            for parameter in module.parameters():
                nn.init.normal_(parameter)
    return model.requires_grad_(False).to(dtype)


def images(
    count: int = 1, size: int = 2, channels: int = 3, dtype: Any = torch.float32
) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(size, channels, 8, 8, generator=generator, dtype=dtype)
        for _ in range(count)
    ]


def called(graph: Any, name: str) -> Any:
    """The one node that calls a module."""
    (node,) = (
        node
        for node in graph.graph.nodes
        if node.op == "call_module" and node.target == name
    )
    return node


@pytest.mark.parametrize(
    "spec",
    [
        INT8,
        TensorSpec("int8", per_channel=True),
        TensorSpec("uint4", symmetric=False, block_size=8),
        TensorSpec("fp8e4m3"),
        TensorSpec("mxfp4e2m1"),
    ],
    ids=str,
)
def test_weights_alone_compute_what_the_quantized_module_computes(
    spec: TensorSpec,
) -> None:
    model = seeded(Kinds)
    inputs = (images(channels=4)[0], torch.tensor([1, 7]))
    config = TorchConfig(LayerSpec(spec), types=(("Embedding", LayerSpec(spec)),))
    graph, report = quantize_graph(model, None, config, example_args=inputs)
    eager = copy.deepcopy(model)
    theirs = quantize_model(eager, None, config)
    assert report.quantized == theirs.quantized
    narrow = {name: why for name, why in theirs.kept.items() if why == TOO_NARROW}
    assert report.kept == narrow
    assert torch.equal(graph(*inputs), eager(*inputs)) and not torch.equal(
        graph(*inputs), model(*inputs)
    )
    own, other = graph.state_dict(), eager.state_dict()
    assert own.keys() == other.keys() and all(
        torch.equal(own[name], other[name]) for name in own
    )


class Bags(nn.Module):
    """Bags of embeddings, called in all ways there are."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(9, 16, mode="mean", padding_idx=0)
        self.weighted = nn.EmbeddingBag(7, 16, mode="sum", include_last_offset=True)
        self.greatest = nn.EmbeddingBag(9, 16, mode="max")
        self.linear = nn.Linear(16, 4)

    def forward(self, ids: Any, flat: Any, offsets: Any, weights: Any) -> Any:
        found = (
            self.rows(ids)
            + self.weighted(flat, offsets, per_sample_weights=weights)
            + self.greatest(ids)
        )
        return self.linear(found)


def test_bags_of_embeddings() -> None:
    model = seeded(Bags)
    inputs = (
        torch.tensor([[1, 0, 3], [4, 4, 0]]),
        torch.tensor([6, 5, 0, 1, 2]),
        torch.tensor([0, 2, 5]),
        torch.tensor([0.5, 2.0, -1.0, 1.0, 0.25]),
    )
    spec = LayerSpec(TensorSpec("int4", block_size=8))
    config = TorchConfig(spec, types=(("EmbeddingBag", spec),))
    graph, report = quantize_graph(model, None, config, example_args=inputs)
    eager = copy.deepcopy(model)
    theirs = quantize_model(eager, None, config)
    assert report.quantized == theirs.quantized and set(report.quantized) == {
        "rows",
        "weighted",
        "greatest",
        "linear",
    }
    assert torch.equal(graph(*inputs), eager(*inputs)) and not torch.equal(
        graph(*inputs), model(*inputs)
    )
    plain, left = quantize_graph(model, None, TorchConfig(spec), example_args=inputs)
    assert set(left.quantized) == {"linear"}
    rounded = copy.deepcopy(model)
    quantize_model(rounded, None, TorchConfig(spec))
    assert torch.equal(plain(*inputs), rounded(*inputs))


def test_inputs_are_rounded_as_those_of_modules() -> None:
    def net() -> Any:
        parts = [
            nn.Conv2d(3, 4, 3),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.ReLU6(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        ]
        return nn.Sequential(*parts, nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))

    model, batches = seeded(net), images(3)
    graph, _ = quantize_graph(model, batches, TorchConfig(BOTH), batches[0])
    eager = copy.deepcopy(model)
    quantize_model(eager, batches, TorchConfig(BOTH))
    for batch in batches:
        assert torch.equal(graph(batch), eager(batch)) and not torch.equal(
            graph(batch), model(batch)
        )
    tokens_each = LayerSpec(INT8, TensorSpec("int8", per_channel=True, dynamic=True))
    graph, _ = quantize_graph(model, None, TorchConfig(tokens_each), batches[0])
    eager = copy.deepcopy(model)
    quantize_model(eager, None, TorchConfig(tokens_each))
    assert torch.equal(graph(batches[1]), eager(batches[1]))


def rounded(x: Any, of: Any = None) -> Any:
    """What int8 codes leave, by the scale of a weight, or of another tensor.

    Codes are found in 32 bits.
    """
    scale = np.float32(
        (np.abs(x).max() if of is None else np.float64(np.float32(np.abs(of).max())))
        / 127.5
    )
    codes = np.clip(np.rint(x.astype(np.float32) / scale), -128, 127)
    return (codes * scale).astype(np.float64)


def test_a_residual_net_equals_a_computation_by_hand() -> None:
    model, (x,) = seeded(Residual, torch.float64), images(dtype=torch.float64)
    graph, report = quantize_graph(model, [x], TorchConfig(BOTH), x)
    own = {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    def conv(x: Any, weight: Any, padding: int) -> Any:
        return F.conv2d(
            torch.from_numpy(x), torch.from_numpy(weight), padding=padding
        ).numpy()

    factor = own["bn.weight"] / np.sqrt(own["bn.running_var"] + model.bn.eps)
    weight = own["conv.weight"] * factor[:, None, None, None]
    bias = ((own["conv.bias"] - own["bn.running_mean"]) * factor + own["bn.bias"])[
        :, None, None
    ]
    floats = np.maximum(conv(x.numpy(), weight, 1) + bias, 0)
    float_side = conv(floats, own["side.weight"], 0)
    float_sum = floats + float_side
    first = np.maximum(
        conv(rounded(x.numpy(), x.numpy()), rounded(weight), 1) + bias, 0
    )
    first = rounded(first, floats)  # for both of its readers
    side = conv(first, rounded(own["side.weight"]), 0)
    total = rounded(first + rounded(side, float_side), float_sum)
    pooled = total.reshape(2, 4, 4, 2, 4, 2).max((3, 5)).reshape(2, 64)
    expected = pooled @ rounded(own["fc.weight"]).T + own["fc.bias"]
    assert np.allclose(graph(x).numpy(), expected, rtol=0, atol=1e-12)
    assert set(report.quantized) == {"conv", "side", "fc", "add", "pool"}
    assert report.notes == ["batch norms are part of the weights of conv"]
    assert graph.side.input is graph.relu_rounding  # one for the layer and the sum


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    "conv",
    [
        lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False),
        lambda: nn.Conv2d(4, 6, 3, stride=2),
        lambda: nn.ConvTranspose2d(4, 6, 3, groups=2),
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, bias=False),
    ],
)
def test_folded_batch_norms_compute_the_same(conv: Any, affine: bool) -> None:
    model = seeded(
        lambda: nn.Sequential(conv(), nn.BatchNorm2d(6, affine=affine)), torch.float64
    )
    x = images(channels=4, dtype=torch.float64)[0]
    module = torch.export.export(model, (x,)).module()
    layers, _ = layers_of_graph(module)
    assert fold_batch_norms(module, layers) == ["0"]
    module.recompile()
    assert "batch_norm" not in module.code and torch.allclose(
        module(x), model(x), rtol=0, atol=1e-12
    )
    assert torch.equal(layers["0"].layer(x), module(x))
    if affine and isinstance(model[0], nn.Conv2d):
        assert torch.allclose(
            layers["0"].layer.weight, fuse_conv_bn_eval(model[0], model[1]).weight
        )


def test_a_batch_norm_stays_where_something_else_reads_the_convolution() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: Any) -> Any:
            x = self.conv(x)
            return self.bn(x) * x

    model, (x,) = seeded(Net), images()
    graph, report = quantize_graph(model, None, TorchConfig(LayerSpec(INT8)), x)
    eager = copy.deepcopy(model)
    quantize_model(eager, None, TorchConfig(LayerSpec(INT8)))
    assert not report.notes and torch.equal(graph(x), eager(x))


def test_nothing_is_rounded_between_a_layer_and_its_activation() -> None:
    model, (x,) = seeded(Residual), images()
    graph, _ = quantize_graph(model, [x], TorchConfig(LayerSpec(INT8, INT8, INT8)), x)
    conv = called(graph, "conv")
    assert [str(reader.target) for reader in conv.users] == ["aten.relu.default"]
    (relu,) = conv.users
    (behind,) = (
        relu.users
    )  # what the output of the convolution is rounded by, for all readers
    assert (
        isinstance(graph.get_submodule(behind.target), Rounding)
        and len(behind.users) == 2
    )
    assert graph.conv.output is None and isinstance(graph.side.output, Rounding)
    assert torch.equal(graph.relu_rounding.scale, graph.side.input.scale)


def test_operators_get_what_the_configuration_says() -> None:
    model, (x,) = seeded(Residual), images()
    none = LayerSpec()

    def operators(config: TorchConfig) -> set[str]:
        graph, report = quantize_graph(model, [x], config, x)
        assert bool(torch.equal(graph(x), model(x))) is not bool(report.quantized)
        return set(report.quantized) - {"conv", "side", "fc"}

    assert operators(TorchConfig(BOTH)) == {"add", "pool"}
    assert operators(TorchConfig(BOTH, types=(("add", none),))) == {"pool"}
    assert operators(TorchConfig(BOTH, layers=(("po*", none),))) == {"add"}
    assert operators(TorchConfig(BOTH, exclude=("add", "pool"))) == set()
    assert operators(TorchConfig(LayerSpec(INT8))) == set()
    assert operators(
        TorchConfig(none, types=(("relu", LayerSpec(None, None, INT8)),))
    ) == {"relu"}
    with pytest.raises(
        ConfigError, match="types names 'add', an operator; quantize_graph"
    ):
        quantize_model(model, None, TorchConfig(types=(("add", none),)))


def test_the_batch_may_vary_and_results_are_the_same_again() -> None:
    model, (x,) = seeded(Residual), images()
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    before = copy.deepcopy(model.state_dict())
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    first, _ = quantize_graph(program, [x], TorchConfig(BOTH))
    module = program.module()
    code = module.code
    second, _ = quantize_graph(module, [x], TorchConfig(BOTH))
    third, _ = quantize_graph(model, [x], TorchConfig(BOTH), x, dynamic_shapes=shapes)
    (more,) = images(size=7)
    assert torch.equal(first(more), second(more)) and torch.equal(
        first(more), third(more)
    )
    assert torch.allclose(first(more)[:2], first(more[:2]), atol=1e-6)
    assert module.code == code and torch.equal(module(more), model(more))
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_has_the_codes_of_the_quantized_module(tied: bool) -> None:
    model, (ids, *_) = made(llama(tie_word_embeddings=tied)), tokens()
    int4 = LayerSpec(TensorSpec("int4", block_size=16))
    config = TorchConfig(
        int4, layers=(("*mlp.up_proj", BOTH.with_(input=None)),), exclude=("lm_head",)
    )
    config = config.with_(types=(("Embedding", int4),))
    graph, report = quantize_graph(model, None, config, {"input_ids": ids})
    eager = copy.deepcopy(model)
    theirs = quantize_model(eager, None, config)
    assert report.quantized == theirs.quantized and report.kept == {
        "lm_head": "excluded"
    }
    assert torch.equal(logits(graph, ids), logits(eager, ids))


def test_keys_values_and_static_inputs_of_a_language_model() -> None:
    model, batches = made(llama()), tokens()
    config = TorchConfig(BOTH, exclude=("lm_head",), kv_cache=KVCache(INT8, least=0.01))
    config = config.with_(
        types=tuple((kind, LayerSpec()) for kind in ("add", "mul", "cat", "sub"))
    )
    graph, _ = quantize_graph(model, batches, config, batches[0])
    eager = copy.deepcopy(model)
    quantize_model(eager, batches, config.with_(types=()), progress=False)
    assert torch.equal(logits(graph, batches[0]), logits(eager, batches[0]))
    attention = graph.get_submodule("model.layers.0.self_attn")
    assert attention.q_proj.input is attention.k_proj.input is attention.v_proj.input


def test_operators_that_write_into_what_they_read() -> None:
    class Net(nn.Module):
        def __init__(self, view: bool) -> None:
            super().__init__()
            self.fc, self.view = nn.Linear(4, 4), view

        def forward(self, x: Any) -> Any:
            x = self.fc(x)
            y = x.view(-1) if self.view else x.tanh()
            y.mul_(2)
            return x + y.view_as(x)

    x = torch.randn(2, 4)
    model = Net(view=False).eval()
    graph, report = quantize_graph(model, [x], TorchConfig(BOTH), x)
    assert "mul_." not in graph.code and "add" in report.quantized
    model = Net(view=True).eval()
    with pytest.raises(
        ModelError,
        match="mul_ writes into a tensor that others read; run_decompositions",
    ):
        quantize_graph(model, [x], TorchConfig(BOTH), x)
    graph, _ = quantize_graph(model, None, TorchConfig(LayerSpec(INT8)), x)
    eager = copy.deepcopy(model)
    quantize_model(eager, None, TorchConfig(LayerSpec(INT8)))
    assert torch.equal(graph(x), eager(x))


def test_models_in_training_mode() -> None:
    model, (x,) = seeded(Residual).train(), images()
    graph, report = quantize_graph(model, [x], TorchConfig(BOTH), x)
    assert model.training and report.notes[0].startswith(
        "the model was in training mode"
    )
    other, _ = quantize_graph(model.eval(), [x], TorchConfig(BOTH), x)
    assert torch.equal(graph(x), other(x))
    with pytest.raises(
        ModelError, match=r"bn was exported in training mode; export model.eval\(\)"
    ):
        quantize_graph(torch.export.export(model.train(), (x,)), [x], TorchConfig(BOTH))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch about its own
def test_graphs_that_were_decomposed() -> None:
    model, (x,) = seeded(Residual), images()
    program = torch.export.export(model, (x,))
    expected, _ = quantize_graph(program, [x], TorchConfig(BOTH))
    same, report = quantize_graph(
        program.run_decompositions({}), [x], TorchConfig(BOTH)
    )
    assert torch.equal(same(x), expected(x)) and report.notes
    with pytest.raises(
        ConfigError,
        match=r"no layer would be quantized; conv and 1 more.* fc: it is aten\.addmm, which",
    ):
        quantize_graph(program.run_decompositions(), None, TorchConfig(LayerSpec(INT8)))


def test_weights_that_belong_to_no_layer_or_to_more_than_one_reader() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.randn(4, 4))
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            x = F.linear(self.fc(x), self.own)
            return F.linear(x, self.own * 2) + self.fc.weight.sum()

    model, x = seeded(Net), torch.randn(2, 4)
    graph, report = quantize_graph(model, None, TorchConfig(LayerSpec(INT8)), x)
    assert list(report.quantized) == ["fc", "own"] and report.kept == {
        "linear_2": "its weight is computed"
    }

    def left(weight: Any) -> Any:
        return torch.from_numpy(rounded(weight.numpy())).float()

    y = F.linear(F.linear(x, left(model.fc.weight), model.fc.bias), left(model.own))
    y = (
        F.linear(y, model.own * 2) + model.fc.weight.sum()
    )  # what the other readers read stays float
    assert torch.allclose(graph(x), y, atol=1e-5)


def test_a_layer_that_is_called_twice_has_one_scale() -> None:
    model, inputs = seeded(Kinds), (images(channels=4)[0], torch.tensor([1, 7]))
    alone = tuple((kind, LayerSpec()) for kind in ("add", "relu", "relu6", "hardtanh"))
    graph, _ = quantize_graph(model, [inputs], TorchConfig(BOTH, types=alone), inputs)
    eager = copy.deepcopy(model)
    quantize_model(eager, [inputs], TorchConfig(BOTH))
    assert torch.equal(graph(*inputs), eager(*inputs))


def test_what_is_wrong_is_named() -> None:
    model, (x,) = seeded(Residual), images()
    with pytest.raises(
        ConfigError, match=r"Residual is no exported graph; .*torch.export.export"
    ):
        quantize_graph(model, [x], TorchConfig(BOTH))
    with pytest.raises(
        ConfigError, match=r"exclude names 'poll', .*did you mean 'pool'"
    ):
        quantize_graph(model, [x], TorchConfig(BOTH, exclude=("poll",)), x)
    with pytest.raises(ConfigError, match="gptq works on modules"):
        quantize_graph(model, [x], TorchConfig(BOTH, algorithms=("gptq",)), x)
    with pytest.raises(DataError, match="no calibration data"):
        quantize_graph(model, None, TorchConfig(BOTH), x)
    with pytest.raises(DataError, match="the calibration data is empty"):
        quantize_graph(model, [], TorchConfig(BOTH), x)
    with pytest.raises(DataError, match="cannot be run on sample 0"):
        quantize_graph(model, [x[:, :2]], TorchConfig(BOTH), x)
    quantized, _ = quantize_graph(model, None, TorchConfig(LayerSpec(INT8)), x)
    with pytest.raises(ModelError, match="quantized already"):
        quantize_graph(quantized, [x], TorchConfig(BOTH))
    with pytest.raises(ModelError, match="torch cannot export the Residual"):
        quantize_graph(model, [x], TorchConfig(BOTH), x[:, :2])


def test_what_keeps_a_quantized_graph(tmp_path: Path) -> None:
    model, (x,) = seeded(Residual), images()
    graph, _ = quantize_graph(model, [x], TorchConfig(BOTH), x)
    path = tmp_path / "graph.pt2"
    torch.export.save(torch.export.export(graph, (x,)), path)
    assert torch.allclose(torch.export.load(path).module()(x), graph(x), atol=1e-6)
    other, _ = quantize_graph(model, [2 * x], TorchConfig(BOTH), x)
    assert not torch.equal(other(x), graph(x))
    other.load_state_dict(graph.state_dict())
    assert torch.equal(other(x), graph(x))
    with pytest.raises(
        ConfigError, match="is an exported graph, and these files hold layers alone"
    ):
        save_params(graph, "mine", export_dir=tmp_path)


def test_by_the_names_of_amd_quark() -> None:
    model, (x,) = seeded(Residual), images()
    int8 = Int8PerTensorSpec(symmetric=True, is_dynamic=False).to_quantization_spec()
    config = QConfig(
        QLayerConfig(input_tensors=int8, weight=int8),
        quant_mode="fx_graph_mode",
        exclude=["fc"],
    )
    exported = torch.export.export(model, (x,)).module()
    quantized = ModelQuantizer(config).quantize_model(exported, [x])
    expected, _ = quantize_graph(exported, [x], config.torch_config())
    assert (
        torch.equal(quantized(x), expected(x))
        and ModelQuantizer.freeze(quantized) is quantized
    )
    assert (
        sum(isinstance(module, QuantizedLayer) for module in quantized.modules()) == 2
    )
    assert config.to_dict()["quant_mode"] == "fx_graph_mode"
    with pytest.raises(ConfigError, match="Residual is no exported graph"):
        ModelQuantizer(config).quantize_model(model, [x])
    with pytest.raises(ConfigError, match="a checkpoint has no graph"):
        ModelQuantizer(config).direct_quantize_checkpoint("from", "to")


def test_an_onnx_model_has_a_pair_where_the_graph_rounds(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    import onnx

    from quark_onnx.torch.exports.onnx import write_onnx

    model, (x,) = seeded(Residual), images()
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    graph, _ = quantize_graph(model, [x], TorchConfig(BOTH), x, dynamic_shapes=shapes)
    path = tmp_path / "model.onnx"
    assert write_onnx(graph, x, path).difference < 1e-5  # onnxruntime against torch
    nodes = onnx.load(path).graph.node
    sources = {name: node for node in nodes for name in node.output}
    add = next(
        node for node in nodes if node.op_type == "Add" and "bias" not in node.name
    )
    assert [sources[name].op_type for name in add.input] == ["DequantizeLinear"] * 2
    pool = next(node for node in nodes if node.op_type == "MaxPool")
    assert sources[pool.input[0]].op_type == "DequantizeLinear"
    assert (
        sum(node.op_type == "QuantizeLinear" for node in nodes) == 5
    )  # x, relu, side, sum, pool
