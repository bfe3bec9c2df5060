"""Settings of the rotations of a language model.

After QuaRot (Ashkboos 2024) and SpinQuant (Liu 2024).

A rotation spreads an outlier over all channels, and its inverse in the next weight undoes it. The
rotations of the residual stream (R1 of SpinQuant) and of the values of attention heads (R2) are
folded into weights. Each run rotates the inputs of other layers that write to the stream, such as
down projections (R4).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import ALGORITHMS
from quark_onnx.optimizers.base import require_flag, require_whole
from quark_onnx.torch.algorithms.memory import Shapes


@ALGORITHMS.register("rotation", "quarot", "spinquant")
@dataclass(frozen=True)
class Rotation:
    """Rotate a model to spread outliers over channels; the function of the model is unchanged.

    Attributes:
        r1: rotate the residual stream.
        r2: rotate the values of attention heads.
        r3: rotate queries and keys after the rotary embedding; must be false, since nothing is
            rounded there.
        r4: rotate the inputs of down projections in each run; such a model has no checkpoint.
        size: number of channels that R1 and R4 mix; None mixes all.
        trained: learn R1 and R2 on the loss of the quantized model (SpinQuant).
        steps: number of learning steps.
        seed: the seed of the random signs, and of the order of samples.
    """

    name: ClassVar[str] = "rotation"
    stage: ClassVar[str] = "model"

    r1: bool = True
    r2: bool = True
    r3: bool = False
    r4: bool = False
    size: int | None = None
    trained: bool = False
    steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        require_flag(self, "r1", "r2", "r3", "r4", "trained")
        require_whole(self, "steps")
        require_whole(self, "seed", least=0)
        # A rotation of one channel mixes nothing.
        if self.size is not None:
            require_whole(self, "size", least=2)
        if self.r3:
            raise ConfigError(
                "r3 of rotation is set, but keys are rounded where k_proj computes"
                " them, in front of the rotary embedding: behind it, a rotation changes"
                " nothing; leave it out",
            )
        if not (self.r1 or self.r2 or self.r4):
            raise ConfigError(
                "rotation has neither of r1, r2 and r4; set one of them, or leave the"
                " algorithm out",
            )
        if self.trained and not (self.r1 or self.r2):
            raise ConfigError(
                "rotation learns r1 and r2, and both are off; set one of them, or"
                " trained to false",
            )

    def memory(self, shapes: Shapes) -> int:
        """Return the estimated bytes of the largest matrix before and after, in float64."""
        return 2 * 8 * max((prod(shape) for shape in shapes.layers.values()), default=0)

    @property
    def needs_data(self) -> bool:
        """Whether rotations are learned from data."""
        return self.trained
