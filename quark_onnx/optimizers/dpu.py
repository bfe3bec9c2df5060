"""DPU: imitate the integer engine of Ryzen AI processors in float, to measure its accuracy.

amd-quark 0.13 does the same before XINT8 (postprocess/simulation/simulate_dpu.py). The engine's
averages are in ``quark_onnx.npu.simulate`` instead: a factor in the model would apply twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quark_onnx.graph import Graph, Node
from quark_onnx.kernels.noise import EIGHT_BITS, Rounding
from quark_onnx.optimizers.base import FloatOptimizer, Samples, register, require_flag

#: Denominator of the engine's fixed-point slopes.
_SLOPE = 256
_SIXTH = 1 / 6
_HALF = 0.5


@register
@dataclass(frozen=True)
class DPU(FloatOptimizer):
    """Replaces slopes and gates by the engine's, which changes the float model.

    Attributes:
        slopes: the slope of a LeakyRelu becomes a multiple of 1/256.
        gates: Sigmoid becomes HardSigmoid, ``min(1, max(0, x / 6 + 0.5))``.
    """

    name: ClassVar[str] = "dpu"
    judged: ClassVar[bool] = False
    exact: ClassVar[bool] = False

    slopes: bool = True
    gates: bool = True

    def __post_init__(self) -> None:
        require_flag(self, "slopes", "gates")

    def __call__(
        self,
        graph: Graph,
        samples: Samples = (),
        rounding: Rounding = EIGHT_BITS,
    ) -> int:
        """Rewrite in place; return the number of operators."""
        return sum(self._rewrite(graph, node) for node in graph.nodes)

    def _rewrite(self, graph: Graph, node: Node) -> bool:
        if node.kind == "LeakyRelu" and self.slopes:
            slope = float(node.attribute("alpha", 0.01))
            # Multiples of 1/256 are exact in float32, so that an unchanged slope compares equal.
            rounded = round(slope * _SLOPE) / _SLOPE
            node.set_attribute("alpha", rounded)
            return rounded != slope
        if node.kind == "Sigmoid" and self.gates:
            source = node.inputs[0]
            result = node.outputs[0]
            graph.remove([node])
            graph.add(
                "HardSigmoid",
                [source],
                [result],
                name=node.name,
                alpha=_SIXTH,
                beta=_HALF,
            )
            return True
        return False
