"""Global scales of NVFP4 in layers that vLLM fuses."""

from __future__ import annotations

import math
from collections.abc import Iterator

from quark_onnx.common.containers import grouped_by, present
from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.header import single_value
from quark_onnx.torch.validate.modules import GATES, Module, shards
from quark_onnx.torch.validate.rules import broken

#: vLLM compares the scales of an expert by ``torch.allclose``, whose tolerance this is.
_TOLERANCE = 1e-5


def global_scale_findings(
    checkpoint: Checkpoint,
    weight_scale: str,
    input_scale: str = "",
) -> Iterator[Finding]:
    """Yield layers that are fused, and have different global scales.

    vLLM takes the greatest scale for all codes of a fused layer, and that of the gate for the codes
    of an expert's gate and up layers.

    Args:
        checkpoint: the checkpoint.
        weight_scale: name of the global scale of a weight.
        input_scale: name of that of the inputs, if vLLM takes one that may be too small; experts
            have the greatest scale of their inputs.
    """
    for name, modules in shards(checkpoint.modules):
        yield from _differing_findings(name, modules, weight_scale)
        if input_scale:
            yield from _differing_findings(name, modules, input_scale)
    for expert, modules in _gates(checkpoint).items():
        lasts = ",".join(module.last for module in modules)
        yield from _differing_findings(f"{expert}.{{{lasts}}}", modules, weight_scale)


def _gates(checkpoint: Checkpoint) -> dict[str, list[Module]]:
    """Return the gate and up layers by the name of their expert."""
    found = list[Module]()
    for module in checkpoint.linears:
        if module.experts and module.last in GATES:
            found.append(module)
    return grouped_by(found, lambda module: module.parent)


def _differing_findings(
    name: str,
    modules: list[Module],
    scale: str,
) -> Iterator[Finding]:
    """Yield a fused layer whose parts have different global scales.

    Args:
        name: common name of the layers.
        modules: the layers; those without a single value of that name are left out.
        scale: name of the scale.
    """
    # int4_fp8 has a second scale for each output: single_value returns None, which drops out
    tensors = present(module.tensors.get(scale) for module in modules)
    values = present(map(single_value, tensors))
    # an unusable scale has a finding of its own
    if not all(0 < value < math.inf for value in values):
        return
    if values and max(values) - min(values) > _TOLERANCE * abs(max(values)):
        text = ", ".join(f"{value:.6g}" for value in values)
        yield broken("nvfp4-scales-differ", name, text)
