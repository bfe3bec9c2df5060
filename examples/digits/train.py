"""Train the digits network and write `digits.onnx` and `digits.npz`, the model and the data of the
examples.

Both files are in the repository, and nothing runs this script but the wish to change them:

    pip install torch==2.13.0 scikit-learn
    python examples/digits/train.py

The network is small but holds what a quantizer has to get right: batch normalization (to fold)
after every convolution, a depthwise one with Relu6, a residual Add, two branches into one Concat,
pooling, and a Gemm.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

HERE = Path(__file__).parent
SEED = 0
EPOCHS = 60
BATCH = 64
TEST_IMAGES, CALIBRATION_IMAGES = 450, 200


def conv(
    channels_in: int, channels_out: int, kernel: int, groups: int = 1
) -> nn.Sequential:
    """A convolution that keeps the image's size, and its batch normalization."""
    return nn.Sequential(
        nn.Conv2d(
            channels_in,
            channels_out,
            kernel,
            padding=kernel // 2,
            groups=groups,
            bias=False,
        ),
        nn.BatchNorm2d(channels_out),
    )


class Digits(nn.Module):
    """8x8 grey images in [0, 1], shape [N, 1, 8, 8], to the scores of ten classes, shape [N, 10]."""  # noqa: E501

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(1, 16, 3)
        self.depthwise = conv(16, 16, 3, groups=16)
        nn.init.constant_(
            self.depthwise[1].weight, 3.0
        )  # wide enough that Relu6 has values to clip
        self.pointwise = conv(16, 16, 1)
        self.wide = conv(16, 24, 3)
        self.narrow = conv(16, 24, 1)
        self.top = conv(48, 64, 3)
        self.head = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        stem = self.stem(image).relu()
        inner = self.pointwise(F.relu6(self.depthwise(stem)))
        pooled = F.max_pool2d((stem + inner).relu(), 2)
        branches = torch.cat(
            [self.wide(pooled).relu(), self.narrow(pooled).relu()], dim=1
        )
        scores: Tensor = self.head(self.top(branches).relu().mean(dim=(2, 3)))
        return scores


def fit(images: Tensor, labels: Tensor) -> Digits:
    """Train on images shifted by up to one pixel, with a one-cycle learning rate."""
    model = Digits().train()
    batches = -(-len(images) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=EPOCHS * batches
    )
    for _ in range(EPOCHS):
        for index in torch.randperm(len(images)).split(BATCH):
            dy, dx = torch.randint(0, 3, (2,)).tolist()
            shifted = F.pad(images[index], (1, 1, 1, 1))[:, :, dy : dy + 8, dx : dx + 8]
            loss = F.cross_entropy(model(shifted), labels[index], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def to_onnx(model: Digits) -> onnx.ModelProto:
    """The network node by node, batch normalizations in place, as exporters that do not optimize
    leave it.
    """
    nodes: list[onnx.NodeProto] = []
    weights: list[TensorProto] = []

    def constant(name: str, values: Tensor | NDArray[np.float32]) -> str:
        weights.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def node(op_type: str, name: str, *inputs: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op_type, inputs, [name], name, **attributes))
        return name

    def conv_bn(name: str, x: str) -> str:
        layer, norm = getattr(model, name)
        edge = layer.padding[0]
        weight = constant(f"{name}.weight", layer.weight.detach())
        x = node("Conv", f"{name}.conv", x, weight, group=layer.groups, pads=[edge] * 4)
        state = {
            "scale": norm.weight,
            "bias": norm.bias,
            "mean": norm.running_mean,
            "var": norm.running_var,
        }
        inputs = [
            constant(f"{name}.bn.{key}", value.detach()) for key, value in state.items()
        ]
        return node("BatchNormalization", f"{name}.bn", x, *inputs, epsilon=norm.eps)

    stem = node("Relu", "stem.relu", conv_bn("stem", "image"))
    low, high = (
        constant("relu6.min", np.float32(0)),
        constant("relu6.max", np.float32(6)),
    )
    inner = conv_bn(
        "pointwise",
        node("Clip", "depthwise.relu6", conv_bn("depthwise", stem), low, high),
    )
    joined = node("Relu", "residual.relu", node("Add", "residual", stem, inner))
    pooled = node("MaxPool", "pool", joined, kernel_shape=[2, 2], strides=[2, 2])
    branches = [
        node("Relu", f"{name}.relu", conv_bn(name, pooled))
        for name in ("wide", "narrow")
    ]
    top = node(
        "Relu", "top.relu", conv_bn("top", node("Concat", "concat", *branches, axis=1))
    )
    features = node(
        "Flatten", "flatten", node("GlobalAveragePool", "average", top), axis=1
    )
    head = [
        constant(f"head.{key}", getattr(model.head, key).detach())
        for key in ("weight", "bias")
    ]
    node("Gemm", "scores", features, *head, transB=1)

    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 10])],
        weights,
    )
    opset = [helper.make_opsetid("", 17)]
    proto = helper.make_model(
        graph, opset_imports=opset, ir_version=8, producer_name="examples/digits"
    )
    onnx.checker.check_model(proto, full_check=True)
    return proto


def main() -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = (
        pixels.reshape(-1, 1, 8, 8).astype(np.uint8),
        labels.astype(np.uint8),
    )
    train, test, train_labels, test_labels = train_test_split(
        pixels, labels, test_size=TEST_IMAGES, stratify=labels, random_state=SEED
    )
    model = fit(
        torch.from_numpy(train / np.float32(16)), torch.from_numpy(train_labels).long()
    )
    proto = to_onnx(model)
    onnx.save(proto, HERE / "digits.onnx")
    data = {
        "calibration": train[:CALIBRATION_IMAGES],
        "test": test,
        "labels": test_labels,
    }
    np.savez_compressed(HERE / "digits.npz", **data)

    image = test / np.float32(16)
    (scores,) = ort.InferenceSession(HERE / "digits.onnx").run(None, {"image": image})
    with torch.no_grad():
        error = np.abs(scores - model(torch.from_numpy(image)).numpy()).max()
    accuracy = (scores.argmax(1) == test_labels).mean()
    print(f"test accuracy {accuracy:.4f}, largest difference to torch {error:.1e}")


if __name__ == "__main__":
    main()
