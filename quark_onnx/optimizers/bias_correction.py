"""BiasCorrection: subtract the mean quantization error of each output from the bias.

Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section
4.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from quark_onnx.config.checks import require
from quark_onnx.optimizers.base import LayerOptimizer, register, require_number
from quark_onnx.optimizers.problem import RoundingProblem, Solution

#: Newton steps towards the mean after an activation, and the least slope to divide by.
_STEPS = 8
_LEAST_SLOPE = 0.05
#: Rows of a mean; they are in random order.
_ROWS = 8192


@register
@dataclass(frozen=True)
class BiasCorrection(LayerOptimizer):
    """Subtracts the mean errors of the outputs from the bias.

    Attributes:
        method: "empirical" measures the error after the activation, with already quantized and
            corrected layers before; "analytic" computes it from the mean inputs of the float model
            and the rounding of the weight alone.
        least_gain: the least gain of the output SQNR on held-out samples, in dB, for which the
            biases are kept. Above 0, nothing is done where every output has 40 dB already.
    """

    name: ClassVar[str] = "bias_correction"
    moves_bias: ClassVar[bool] = True

    method: str = "empirical"
    least_gain: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.method in ("empirical", "analytic"),
            "method of bias_correction",
            self.method,
            "empirical or analytic",
        )
        require_number(self, "least_gain", least=0.0)

    @property
    def reads_mean(self) -> bool:
        """Whether the mean input of the float model is read: by the analytic method."""
        return self.method == "analytic"

    def __call__(self, problem: RoundingProblem, present: Solution) -> Solution:
        """Return the present weight with a proposed bias.

        Args:
            problem: the layer.
            present: the solution whose weight is used.
        """
        if self.method == "analytic":
            # (groups, outputs, inputs) times the mean input (groups, inputs): the mean shift of
            # each output.
            rounding = present.weight - problem.weight
            shift = np.einsum("goi,gi->go", rounding, problem.mean())
            return replace(present, bias=(problem.bias - shift).astype(np.float32))
        # (groups, rows, inputs) and (groups, rows, outputs).
        inputs = problem.train.inputs[:, :_ROWS]
        targets = problem.train.targets[:, :_ROWS]
        activation = problem.activation
        product = inputs @ present.weight.swapaxes(1, 2)
        # A mean of thousands of float32 values loses digits without float64 sums.
        wanted = activation.value(targets).mean(axis=1, dtype=np.float64)
        # Before the activation, the difference of the means is the exact correction; it is the
        # start where a function follows.
        mean_target = targets.mean(axis=1, dtype=np.float64)
        mean_product = product.mean(axis=1, dtype=np.float64)
        bias = (mean_target - mean_product).astype(np.float32)
        groups, outputs = map(np.arange, bias.shape)
        for _ in range(0 if activation.linear else _STEPS):
            part = np.ix_(groups, outputs)
            before = bias[part]
            value, derivative = activation.value_and_derivative(
                product + before[:, None]
            )
            missing = wanted[part] - value.mean(axis=1, dtype=np.float64)
            # The derivative of the mean by the bias. It is near 0 where a Relu clips nearly all
            # rows, and a step would then be without limit.
            slope = np.mean(derivative, axis=1, dtype=np.float64)
            step = missing / np.maximum(slope, _LEAST_SLOPE)
            bias[part] = before + step.astype(np.float32)
            # A bias that a step leaves as it is has arrived: most have after three steps.
            moved = bias[part] != before
            if not moved.any():
                break
            if not moved.all():
                by_group, by_output = moved.any(axis=1), moved.any(axis=0)
                groups, outputs = groups[by_group], outputs[by_output]
                product = product[by_group][:, :, by_output]
        return replace(present, bias=bias)
