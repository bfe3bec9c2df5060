"""Networks of a few channels with the operators and the wiring of well-known ones, as amd-quark has
them in front of its Q/DQ nodes: with XINT8 a factor behind each average, and hard sigmoids for
sigmoids.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper


class Network:
    """A model that grows, node by node; every method returns the name of a tensor."""

    def __init__(self, kind: str) -> None:
        self.xint8 = kind == "XINT8"
        self.nodes, self.constants = list[object](), dict[str, np.ndarray]()
        self.channels = {"x": 3}

    def node(
        self, op: str, inputs: list[str], channels: int, **attributes: object
    ) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(
                op, inputs, [name], f"{op}_{len(self.nodes)}", **attributes
            )
        )
        self.channels[name] = channels
        return name

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        return name

    def conv(
        self,
        x: str,
        out: int,
        k: int = 1,
        stride: int = 1,
        act: str = "",
        *,
        depthwise: bool = False,
    ) -> str:
        own = self.channels[x]
        group = own if depthwise else 1
        shape = (out, own // group, k, k)
        inputs = [x, *(self.constant(np.zeros(s, np.float32)) for s in (shape, (out,)))]
        pads = {
            "pads": [k // 2] * 4,
            "strides": [stride] * 2,
            "dilations": [1, 1],
            "kernel_shape": [k, k],
        }
        return self.activated(self.node("Conv", inputs, out, group=group, **pads), act)

    def activated(self, x: str, act: str) -> str:
        if act == "silu":
            return self.node("Mul", [x, self.gate(x)], self.channels[x])
        if act == "hard":
            return self.node("Mul", [x, self.hard(x)], self.channels[x])
        if act == "relu6":
            bounds = [self.constant(np.array(value, np.float32)) for value in (0, 6)]
            return self.node("Clip", [x, *bounds], self.channels[x])
        return self.node("Relu", [x], self.channels[x]) if act else x

    def gate(self, x: str) -> str:
        return (
            self.hard(x) if self.xint8 else self.node("Sigmoid", [x], self.channels[x])
        )

    def hard(self, x: str) -> str:
        return self.factor(
            self.node("HardSigmoid", [x], self.channels[x], alpha=1 / 6, beta=0.5)
        )

    def factor(self, x: str) -> str:
        if not self.xint8:
            return x
        return self.node(
            "Mul", [x, self.constant(np.array(1.0001, np.float32))], self.channels[x]
        )

    def add(self, a: str, b: str) -> str:
        return self.node("Add", [a, b], self.channels[a])

    def pool(self, x: str, k: int = 3, stride: int = 2, pad: int = 1) -> str:
        return self.node(
            "MaxPool",
            [x],
            self.channels[x],
            kernel_shape=[k, k],
            strides=[stride] * 2,
            pads=[pad] * 4,
        )

    def average(self, x: str) -> str:
        return self.factor(self.node("GlobalAveragePool", [x], self.channels[x]))

    def classified(self, x: str) -> str:
        return self.dense(self.node("Flatten", [x], self.channels[x], axis=1), 10)

    def dense(self, x: str, out: int, act: str = "") -> str:
        shapes = ((self.channels[x], out), (out,))
        inputs = [x, *(self.constant(np.zeros(shape, np.float32)) for shape in shapes)]
        return self.activated(self.node("Gemm", inputs, out), act)

    def squeezed(self, x: str, gate: Callable[[str], str], act: str) -> str:
        """Squeeze and excitation."""
        inner = self.conv(self.average(x), 2, act=act)
        return self.node(
            "Mul", [x, gate(self.conv(inner, self.channels[x]))], self.channels[x]
        )

    def shuffled(self, a: str, b: str) -> list[str]:
        joined = self.node("Concat", [a, b], 2 * self.channels[a], axis=1)
        own = self.channels[joined]
        size = self.size
        shapes = [
            self.constant(np.array(s, np.int64))
            for s in ((1, 2, own // 2, *size), (1, own, *size))
        ]
        five = self.node("Reshape", [joined, shapes[0]], own)
        turned = self.node("Transpose", [five], own, perm=[0, 2, 1, 3, 4])
        flat = self.node("Reshape", [turned, shapes[1]], own)
        return [flat]

    def halves(self, x: str) -> list[str]:
        own, found = self.channels[x], list[str]()
        for start in (0, own // 2):
            bounds = [
                self.constant(np.array([v], np.int64))
                for v in (start, start + own // 2, 1, 1)
            ]
            found.append(self.node("Slice", [x, *bounds], own // 2))
        return found

    size = (28, 28)

    def model(self, result: str) -> ModelProto:
        last = self.nodes[-1]
        assert result == last.output[0]  # type: ignore[attr-defined]
        graph = helper.make_graph(
            self.nodes,
            "network",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 3, 224, 224))],
            [helper.make_tensor_value_info(result, TensorProto.FLOAT, (1, 10))],
            [
                numpy_helper.from_array(array, name)
                for name, array in self.constants.items()
            ],
        )
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
        )


def resnet(kind: str, blocks: tuple[int, ...], *, deep: bool) -> ModelProto:
    net = Network(kind)
    x = net.pool(net.conv("x", 4, 7, 2, "relu"))
    for stage, count in enumerate(blocks):
        out = 4 * 2**stage * (4 if deep else 1)
        for block in range(count):
            stride = 2 if stage and not block else 1
            if deep:
                y = net.conv(
                    net.conv(
                        net.conv(x, out // 4, 1, 1, "relu"), out // 4, 3, stride, "relu"
                    ),
                    out,
                )
            else:
                y = net.conv(net.conv(x, out, 3, stride, "relu"), out, 3)
            aside = net.conv(x, out, 1, stride) if not block and (stage or deep) else x
            x = net.activated(net.add(y, aside), "relu")
    return net.model(net.classified(net.average(x)))


def squeezenet(kind: str, pools: tuple[int, ...]) -> ModelProto:
    net = Network(kind)
    x = net.conv("x", 8, 7, 2, "relu")
    for place in range(9):
        if place in pools:
            x = net.pool(x, pad=0)
        if place < 8:
            narrow = net.conv(x, 2, act="relu")
            x = net.node(
                "Concat",
                [net.conv(narrow, 4, act="relu"), net.conv(narrow, 4, 3, act="relu")],
                8,
                axis=1,
            )
    x = net.average(net.conv(x, 10, act="relu"))
    return net.model(net.node("Flatten", [x], 10, axis=1))


#: Of the inverted bottlenecks: expansion, channels, repeats, stride.
_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def mobilenet_v2(kind: str) -> ModelProto:
    net = Network(kind)
    x = net.conv("x", 4, 3, 2, "relu6")
    for wide, out, repeats, first in _V2:
        for block in range(repeats):
            stride = first if not block else 1
            y = net.conv(x, 8, act="relu6") if wide > 1 else x
            y = net.conv(
                net.conv(y, net.channels[y], 3, stride, "relu6", depthwise=True),
                out // 8,
            )
            x = (
                net.add(x, y)
                if stride == 1 and net.channels[x] == out // 8 and block
                else y
            )
    return net.model(net.classified(net.average(net.conv(x, 16, act="relu6"))))


#: Of the small variant: kernel, whether it expands, channels, squeeze and excitation, activation,
#: stride.
_V3 = (
    (3, 0, 16, 1, "relu", 2), (3, 1, 24, 0, "relu", 2), (3, 1, 24, 0, "relu", 1), (5, 1, 40, 1, "hard", 2),  # noqa: E501
    (5, 1, 40, 1, "hard", 1), (5, 1, 40, 1, "hard", 1), (5, 1, 48, 1, "hard", 1), (5, 1, 48, 1, "hard", 1),  # noqa: E501
    (5, 1, 96, 1, "hard", 2), (5, 1, 96, 1, "hard", 1), (5, 1, 96, 1, "hard", 1),
)  # fmt: skip


def mobilenet_v3(kind: str) -> ModelProto:
    net = Network(kind)
    x = net.conv("x", 16, 3, 2, "hard")
    for k, wide, out, excited, act, stride in _V3:
        y = net.conv(x, 8, act=act) if wide else x
        y = net.conv(y, net.channels[y], k, stride, act, depthwise=True)
        y = net.squeezed(y, net.hard, "relu") if excited else y
        y = net.conv(y, out)
        x = net.add(x, y) if stride == 1 and net.channels[x] == out else y
    x = net.average(net.conv(x, 16, act="hard"))
    x = net.dense(net.node("Flatten", [x], 16, axis=1), 16, "hard")
    return net.model(net.dense(x, 10))


#: Expansion, kernel, stride, channels, repeats.
_B0 = ((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4),  # noqa: E501
       (6, 3, 1, 320, 1))  # fmt: skip


def efficientnet(kind: str, depth: float) -> ModelProto:
    net = Network(kind)
    x = net.conv("x", 4, 3, 2, "silu")
    for wide, k, first, out, repeats in _B0:
        for block in range(ceil(repeats * depth)):
            y = net.conv(x, 8, act="silu") if wide > 1 else x
            y = net.conv(
                y, net.channels[y], k, first if not block else 1, "silu", depthwise=True
            )
            y = net.conv(net.squeezed(y, net.gate, "silu"), out // 8)
            x = net.add(x, y) if block else y
    return net.model(net.classified(net.average(net.conv(x, 16, act="silu"))))


def shufflenet(kind: str) -> ModelProto:
    net = Network(kind)
    x = net.pool(net.conv("x", 8, 3, 2, "relu"))
    net.size = (56, 56)
    for repeats in (4, 8, 4):
        net.size = (net.size[0] // 2, net.size[1] // 2)
        a = net.conv(net.conv(x, net.channels[x], 3, 2, depthwise=True), 8, act="relu")
        b = net.conv(
            net.conv(net.conv(x, 8, act="relu"), 8, 3, 2, depthwise=True), 8, act="relu"
        )
        [x] = net.shuffled(a, b)
        for _ in range(repeats - 1):
            a, b = net.halves(x)
            b = net.conv(
                net.conv(net.conv(b, 8, act="relu"), 8, 3, depthwise=True),
                8,
                act="relu",
            )
            [x] = net.shuffled(a, b)
    x = net.conv(x, 16, act="relu")
    x = net.factor(net.node("ReduceMean", [x], 16, axes=[2, 3], keepdims=0))
    return net.model(net.dense(x, 10))


def densenet(kind: str, blocks: tuple[int, ...]) -> ModelProto:
    """Dense layers; each BatchNormalization without a convolution before it is one with one tap."""
    net = Network(kind)

    def normalized(x: str) -> str:
        return net.conv(x, net.channels[x], act="relu", depthwise=True)

    x = net.pool(net.conv("x", 4, 7, 2, "relu"))
    for number, layers in enumerate(blocks):
        features = [x]
        for _ in range(layers):
            y = net.conv(net.conv(normalized(x), 8, act="relu"), 2, 3)
            features.append(y)
            channels = sum(net.channels[name] for name in features)
            x = net.node("Concat", features, channels, axis=1)
        x = normalized(x)
        if number < len(blocks) - 1:
            x = net.conv(x, 4)
            pool = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 0, 0]}
            x = net.factor(net.node("AveragePool", [x], 4, **pool))
    return net.model(net.classified(net.average(x)))


NETWORKS: dict[str, Callable[[str], ModelProto]] = {
    "ResNet-18": lambda kind: resnet(kind, (2, 2, 2, 2), deep=False),
    "ResNet-34": lambda kind: resnet(kind, (3, 4, 6, 3), deep=False),
    "ResNet-50": lambda kind: resnet(kind, (3, 4, 6, 3), deep=True),
    "SqueezeNet 1.0": lambda kind: squeezenet(kind, (0, 3, 7)),
    "SqueezeNet 1.1": lambda kind: squeezenet(kind, (0, 2, 4)),
    "MobileNetV2": mobilenet_v2,
    "MobileNetV3": mobilenet_v3,
    "EfficientNet-b0": lambda kind: efficientnet(kind, 1.0),
    "EfficientNet-b1": lambda kind: efficientnet(kind, 1.1),
    "EfficientNet-b2": lambda kind: efficientnet(kind, 1.2),
    "ShuffleNetV2": shufflenet,
}
