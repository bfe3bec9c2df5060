"""quantize_module: the quantized ONNX model computes what the PyTorch module computes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QuarkError, quantize_module
from quark_onnx.common.errors import ConfigError, DataError, ModelError

# torch and onnxscript use what they say is deprecated
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def cnn() -> Any:
    """A float CNN in training mode, with batch normalization."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


def images(count: int = 6, batch: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(batch, 3, 12, 12, generator=generator) for _ in range(count)]


class TwoInputs(nn.Module):
    """An image and a vector, with an option that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.image = nn.Conv2d(3, 4, 3)
        self.vector = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, image: Any, vector: Any, scale: float = 1.0) -> dict[str, Any]:
        mixed = torch.relu(self.image(image)).mean((2, 3)) + self.vector(vector) * scale
        return {"logits": self.head(mixed), "mixed": mixed}


def pairs(count: int = 6) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(4, 3, 8, 8, generator=generator),
            torch.randn(4, 6, generator=generator),
        )
        for _ in range(count)
    ]


@cache
def of_pairs() -> onnx.ModelProto:
    return quantize_module(TwoInputs(), pairs()[0], pairs()).model


def expected(module: Any, *inputs: Any) -> Any:
    training = module.training
    module.eval()
    with torch.no_grad():
        found = module(*inputs)
    module.train(training)
    return found


def run(model: Path | onnx.ModelProto, **inputs: Any) -> list[Any]:
    """Compute outputs, without sums of 8-bit products that saturate on some processors."""
    feeds = {name: value.numpy() for name, value in inputs.items()}
    return list(open_session(model).run(None, feeds))


def sqnr(found: Any, reference: Any) -> float:
    """Signal-to-noise ratio in dB, in float64."""
    reference = np.asarray(reference, np.float64)
    noise = reference - np.asarray(found, np.float64)
    return float(10 * np.log10(np.sum(reference**2) / np.sum(noise**2)))


def op_types(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


def test_a_cnn(tmp_path: Path) -> None:
    module, output = cnn(), tmp_path / "cnn.onnx"
    model = quantize_module(module, images(1, 1)[0], images(), "A8W8", output).model
    assert module.training, "the mode is restored"
    assert onnx.load(output) == model
    assert "QuantizeLinear" in op_types(model)
    other = torch.randn(7, 3, 12, 12, generator=torch.Generator().manual_seed(9))
    found = run(output, input=other)[0]
    assert (
        sqnr(found, expected(module, other)) > 25
    )  # uniform noise of 8 bits in four layers


def test_a_transformer_encoder_of_any_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    data = [
        torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(seed))
        for seed in range(6)
    ]
    axes = {"src": {0: "batch", 1: "time"}}
    model = quantize_module(module, (data[0],), data, "A8W8", dynamic=axes).model
    assert [dim.dim_param for dim in model.graph.input[0].type.tensor_type.shape.dim][
        :2
    ] == ["batch", "time"]
    other = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(9))
    found = run(model, src=other)[0]
    assert sqnr(found, expected(module, other)) > 25


@pytest.mark.parametrize(
    "kind", ["tuples", "dicts", "loader", "loader of dicts", "generator"]
)
def test_two_inputs_and_any_kind_of_data(kind: str) -> None:
    module, data = TwoInputs(), pairs()
    stacked = TensorDataset(
        *(torch.cat(parts) for parts in zip(*data, strict=True)), torch.arange(24)
    )
    labelled = [
        {"labels": torch.zeros(1), "image": image, "vector": vector}
        for image, vector in data
    ]
    kinds: dict[str, Any] = {
        "tuples": data,
        "dicts": [{"vector": vector, "image": image} for image, vector in data],
        "loader": DataLoader(stacked, batch_size=4),  # labels follow the inputs
        "loader of dicts": DataLoader(labelled, batch_size=None),
        "generator": (each for each in data),
    }
    model = quantize_module(module, data[0], kinds[kind]).model
    assert [value.name for value in model.graph.input] == ["image", "vector"]
    assert [value.name for value in model.graph.output] == ["logits", "mixed"]
    reference = expected(module, *data[1])
    found = run(model, image=data[1][0], vector=data[1][1])
    assert sqnr(found[0], reference["logits"]) > 25
    assert model.graph.initializer == of_pairs().graph.initializer, (
        "the same samples give the same scales"
    )


@pytest.mark.parametrize("kind", ["pairs", "dicts", "loader", "loader of dicts"])
def test_labels_of_the_data_give_the_top_1_of_both_models(kind: str) -> None:
    module = nn.Sequential(*cnn(), nn.Softmax(1)).eval()
    with torch.no_grad():
        module[-2].weight.mul_(20)  # otherwise all classes are about as probable
    batches = images(40)
    with torch.no_grad():
        classes = [module(batch).argmax(1) for batch in batches]
    labelled = [
        {"input": batch, "labels": right}
        for batch, right in zip(batches, classes, strict=True)
    ]
    stacked = TensorDataset(torch.cat(batches), torch.cat(classes))
    kinds: dict[str, Any] = {
        "pairs": list(zip(batches, classes, strict=True)),
        "dicts": labelled,
        "loader": DataLoader(stacked, batch_size=4),
        "loader of dicts": DataLoader(labelled, batch_size=None),
    }
    report = quantize_module(module, batches[0], kinds[kind]).report
    # Rows are counted, rather than the 40 batches of 4.
    assert (report.samples, report.held_out, report.labelled) == (134, 26, 26)
    top1 = report.scores[0]
    assert (top1.name, top1.reference) == ("top1", 1.0)
    # Another class is chosen where two scores differ by less than the noise.
    assert top1.other >= 24 / 26


@pytest.mark.parametrize("kind", ["list", "iterator", "iterable", "loader"])
def test_samples_are_rows_of_batches(kind: str) -> None:
    batches = images(40)
    kinds: dict[str, Any] = {
        "list": batches,
        "iterator": iter(batches),
        "iterable": dict(enumerate(batches)).values(),
        "loader": DataLoader(torch.cat(batches), batch_size=16),
    }
    report = quantize_module(nn.Sequential(*cnn()), batches[0], kinds[kind]).report
    assert (report.samples, report.held_out) == (134, 26)


def test_batches_of_a_fixed_size_are_samples() -> None:
    batches = images(40)
    module = nn.Sequential(*cnn())
    report = quantize_module(module, batches[0], batches, dynamic=False).report
    assert (report.samples, report.held_out) == (36, 4)


def test_values_that_are_no_tensors_are_constants() -> None:
    module, data = TwoInputs(), pairs()
    example = {"image": data[0][0], "vector": data[0][1], "scale": 0.25}
    model = quantize_module(module, example, [(*pair, 0.25) for pair in data]).model
    reference = expected(module, *data[1], 0.25)
    found = run(model, image=data[1][0], vector=data[1][1])
    assert sqnr(found[0], reference["logits"]) > 25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_become_float32(dtype: Any) -> None:
    module = cnn().eval().to(dtype)
    data = [batch.to(dtype) for batch in images()]
    model = quantize_module(module, data[0], data).model
    assert next(module.parameters()).dtype == dtype, "the module is not changed"
    assert model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    reference = expected(cnn().to(dtype).float(), data[0].float())
    assert sqnr(run(model, input=data[0].float())[0], reference) > 25


class Classifier(nn.Module):
    """Token ids and a mask, as a language model has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(20, 16)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        weights = attention_mask.unsqueeze(-1).float()
        states = torch.tanh(self.layer(self.table(input_ids))) * weights
        return self.head(states.sum(1) / weights.sum(1))


def test_token_ids_have_a_dynamic_batch_and_sequence() -> None:
    module = Classifier()
    generator = torch.Generator().manual_seed(5)
    data = [
        {
            "input_ids": torch.randint(0, 20, (2, length), generator=generator),
            "attention_mask": torch.ones(2, length, dtype=torch.int64),
        }
        for length in (5, 7, 5, 9, 6, 7)
    ]
    model = quantize_module(module, data[0], data).model
    for value in model.graph.input:
        assert [dim.dim_param for dim in value.type.tensor_type.shape.dim] == [
            "batch",
            "sequence",
        ]
    other = {name: tensor[:1, :4] for name, tensor in data[1].items()}
    assert sqnr(run(model, **other)[0], expected(module, *other.values())) > 25


class Branching(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2 if x.sum().item() > 0 else x - 1


def test_a_module_that_cannot_be_exported_is_named() -> None:
    with pytest.raises(ModelError, match="torch cannot export the model"):
        quantize_module(Branching(), torch.ones(2, 3), [torch.ones(2, 3)])


class Wrong(nn.Module):
    """In an export it computes something else than in torch."""

    def forward(self, x: Any) -> Any:
        return x * (3 if torch.compiler.is_exporting() else 2)


def test_an_export_that_computes_something_else_is_refused() -> None:
    with pytest.raises(ModelError, match="differs from torch's"):
        quantize_module(Wrong(), torch.ones(2, 3), [torch.ones(2, 3)])


def test_weights_alone_need_no_data() -> None:
    module = cnn()
    model = quantize_module(module, images(1)[0], None, "W8", dynamic=False).model
    assert [
        dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim
    ] == [4, 3, 12, 12]
    assert sqnr(run(model, input=images(1)[0])[0], expected(module, images(1)[0])) > 30


def test_a_format_of_16_bits_raises_the_opset() -> None:
    model = quantize_module(cnn(), images(1)[0], images(), "A16W8").model
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    assert opset >= 21  # the first with QuantizeLinear of 16 bits
    assert sqnr(run(model, input=images(1)[0])[0], expected(cnn(), images(1)[0])) > 35


def stream() -> Iterator[Any]:
    yield torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"module": "model.pt"},
            ConfigError,
            "module is a str; it must be a torch.nn.Module",
        ),
        ({"opset": 17}, ConfigError, "opset is 17; torch exports opsets 18 to"),
        (
            {"example_inputs": pairs()[0][:1]},
            DataError,
            r"does not run on the example inputs \(image\): .*vector",
        ),
        (
            {"example_inputs": 3},
            DataError,
            "inputs are a int; a tensor, a dict or a list of tensors is needed",
        ),
        (
            {"dynamic": {"images": {0: "batch"}}},
            ConfigError,
            "dynamic names the input 'images'; inputs are image, vec",
        ),
        (
            {"data": stream()},
            DataError,
            "a batch holds 4 values, but forward takes image, vector, scale",
        ),
        (
            {"data": [{"image": torch.zeros(4, 3, 8, 8)}]},
            QuarkError,
            "no array for input 'vector'",
        ),
        ({"data": [{"imag": torch.zeros(1)}]}, QuarkError, "no input 'imag'.*image"),
        (
            {"data": [torch.zeros(4, 3, 8, 8)]},
            QuarkError,
            "sample 0: got Tensor, expected {name: array}",
        ),
        (
            {"data": [(*pairs()[0], torch.zeros(1))]},
            DataError,
            "has a tensor for 'scale', but example_inputs have none",
        ),
        ({"data": None}, QuarkError, "data"),
        ({"config": "A9W9"}, QuarkError, "A9W9"),
    ],
)
def test_errors_name_what_is_wrong(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    call = {
        "module": TwoInputs(),
        "example_inputs": pairs()[0],
        "data": pairs(),
        "config": "A8W8",
    } | settings
    with pytest.raises(error, match=message):
        quantize_module(**call)


def test_without_torch_the_message_names_the_extra() -> None:
    code = """
import sys
sys.modules["torch"] = None
import quark_onnx
try:
    quark_onnx.quantize_module(None, None, None)
except quark_onnx.QuarkError as error:
    print(type(error).__name__, error)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith(
        "MissingDependency quantize_module needs torch and onnxscript"
    )
