"""Observers, which turn activations of layers into scales."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from calibrators import MinMax
from calibrators.base import range_of
from quark_onnx.common.errors import DataError, ModelError
from quark_onnx.torch.config.number_formats import TwoLevel
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.formats import affine
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.block_formats import global_scale_for
from quark_onnx.torch.models.fused_groups import groups_across_experts
from quark_onnx.torch.models.quantized_layer import split_input
from quark_onnx.torch.runtime import distributed

#: Larger tensors are subsampled evenly before they enter a histogram.
_AT_ONCE = 1 << 22


class ActivationObserver:
    """Observer of one activation."""

    def __init__(self, spec: TensorSpec, name: str, device: torch.device | str) -> None:
        self.spec, self._name = spec, name
        self._statistic = spec.calibrator.statistic()
        # The dtype of the activation; None until a tensor was observed.
        self._model: Any = None
        self._device: Any = device

    def observe(self, x: torch.Tensor) -> None:
        """Add a tensor to the statistic.

        Raises:
            DataError: the tensor holds NaN or infinity.
        """
        # An expert without tokens may be called with an empty tensor, which has no minimum.
        if not x.numel():
            return
        self._model = x.dtype
        # aminmax propagates NaN: one pass finds the range and any number that is not finite.
        ends = torch.stack(torch.aminmax(x)).float().cpu().numpy()
        if not np.isfinite(ends).all():
            raise DataError(
                f"{self._name} is infinite or no number on the calibration data; the"
                f" model overflows in {x.dtype}, or the data does not suit it",
            )
        # The extremes are all that min-max needs; no activation is copied to the host.
        if isinstance(self.spec.calibrator, MinMax):
            self._statistic.observe(ends.reshape(1, 2))
            return
        values = x.reshape(-1)
        # At most _AT_ONCE values, from all channels: a step that divides the number of channels, as
        # powers of two often do, would always meet the same ones.
        step = -(-len(values) // _AT_ONCE)
        while math.gcd(step, x.shape[-1]) > 1:
            step += 1
        thinned = values[::step].float().cpu().numpy()
        if step > 1:  # subsampling may have dropped the extremes
            thinned = np.concatenate([thinned, ends])
        self._statistic.observe(thinned.reshape(1, -1))

    def over_ranks(self) -> None:
        """Merge the statistics of all processes, in the order of their ranks.

        Collective: every rank must call this.
        """
        if distributed.count() == 1:
            return
        # A rank whose data did not reach the layer has nothing to merge, and no dtype.
        parts = distributed.gathered((self._statistic, self._model))
        self._statistic = self.spec.calibrator.statistic()
        for statistic, model in parts:
            if model is not None:
                self._model = model
                self._statistic.merge(statistic)

    def params(self, least: float = 0.0) -> Params | None:
        """Return the scale, or None without an observed tensor.

        Args:
            least: the least scale.
        """
        if self._model is None:
            return None
        if isinstance(self.spec.dtype, TwoLevel):
            # NVFP4 stores one calibrated number, the global scale; block scales follow from each
            # input.
            reach = max(float(self._statistic.hi[0]), -float(self._statistic.lo[0]))
            return Params(global_scale_for(torch.tensor(reach)).to(self._device))
        # The statistic has one row: activations have a single scale per tensor.
        ends = range_of(self.spec.calibrator, self._statistic, self.spec.grid)
        params = affine.of_numbers(
            float(ends.lo[0]), float(ends.hi[0]), self.spec, self._model
        )
        # Keys and values have a lower bound of their scales (KVCache.least).
        bounded = Params(params.scale.clamp(min=least), params.zero)
        return bounded.each(lambda tensor: tensor.to(self._device))


@dataclass(frozen=True)
class Scales:
    """Calibrated scales by layer name.

    Attributes:
        inputs: scales of layer inputs.
        outputs: scales of layer outputs.
        probabilities: scales of the attention probabilities.
    """

    inputs: Mapping[str, Params] = field(default_factory=dict)
    outputs: Mapping[str, Params] = field(default_factory=dict)
    probabilities: Mapping[str, Params] = field(default_factory=dict)

    def of(self, name: str) -> dict[str, Params | None]:
        """Return the scales of a layer as arguments of ``QuantizedLayer``."""
        return {
            "input": self.inputs.get(name),
            "output": self.outputs.get(name),
            "probabilities": self.probabilities.get(name),
        }


class ActivationObservers:
    """Hooks on layers whose activations need calibrated scales, as a context manager.

    Args:
        layers: modules and their specs, by name.
    """

    def __init__(self, layers: Mapping[str, tuple[Any, LayerSpec]]) -> None:
        self._layers = layers
        self._hooks = contextlib.ExitStack()
        self.inputs: dict[str, ActivationObserver] = {}
        self.outputs: dict[str, ActivationObserver] = {}
        self.probabilities: dict[str, ActivationObserver] = {}
        #: Inactive experts that took an input scale of other experts in ``scales``.
        self.borrowing: list[str] = []

    def __enter__(self) -> ActivationObservers:
        for name, (module, spec) in self._layers.items():
            if spec.input is not None and spec.input.measured:
                observer = self.inputs[name] = ActivationObserver(
                    spec.input, f"the input of {name}", module.weight.device
                )
                hook = _input_hook(observer)
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                self._hooks.enter_context(handle)
            if spec.output is not None and spec.output.measured:
                observer = self.outputs[name] = ActivationObserver(
                    spec.output, f"the output of {name}", module.weight.device
                )
                if spec.rotated:
                    # Attention calls this attribute of a float layer as it calls that of a
                    # QuantizedLayer.
                    module.round_keys = _keys_hook(observer, name, len(module.weight))
                else:
                    hook = _output_hook(observer)
                    self._hooks.enter_context(module.register_forward_hook(hook))
            if spec.probabilities is not None:
                observer = self.probabilities[name] = ActivationObserver(
                    spec.probabilities,
                    f"the softmax of the attention of {name}",
                    module.weight.device,
                )
                module.round_probabilities = _probabilities_hook(observer)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()
        for module, _ in self._layers.values():
            # Instance attributes, which would otherwise observe further runs.
            for name in ("round_keys", "round_probabilities"):
                vars(module).pop(name, None)
        # Merging waits for all ranks: after an error this one must not wait for them.
        if error[0] is None:
            for observers in (self.inputs, self.outputs, self.probabilities):
                for observer in observers.values():
                    observer.over_ranks()

    def scales(self, least: Callable[[str], float] = lambda name: 0.0) -> Scales:
        """Return the scales of layers that were active during calibration.

        Clients keep one input scale for all experts of a block, the greatest. An inactive expert
        takes the scale of the other experts, since clients would read a missing scale as 1.0. In
        NVFP4, whose block scales depend on the tensor's scale, all experts take the greatest scale.

        Args:
            least: returns the least scale of a layer's output.
        """
        inputs = _params_of(self.inputs)
        self.borrowing = []
        for group in groups_across_experts(self.inputs):
            self._share(group, inputs)
        outputs = _params_of(self.outputs, least)
        return Scales(inputs, outputs, _params_of(self.probabilities))

    def unseen(self, name: str, scales: Scales) -> bool:
        """Return whether a layer that needs calibrated scales was inactive.

        Args:
            name: the layer.
            scales: the result of ``scales``, in which other experts may have lent theirs.
        """
        pairs = (
            (self.inputs, scales.inputs),
            (self.outputs, scales.outputs),
            (self.probabilities, scales.probabilities),
        )
        return any(
            name in observers and name not in params for observers, params in pairs
        )

    def _share(self, group: list[str], inputs: dict[str, Params]) -> None:
        """Give inactive experts, and NVFP4 experts, the greatest scale of the group.

        Args:
            group: names of layers with a common input, of all experts of a block.
            inputs: the input scales by layer, changed in place.
        """
        for name in group:
            spec = self.inputs[name].spec
            # Scales of another format or calibrator are not comparable.
            alike = [
                inputs[member]
                for member in group
                if member in inputs and self.inputs[member].spec == spec
            ]
            if not alike:
                continue
            if name not in inputs:
                self.borrowing.append(name)
            # An expert with data keeps its own scale; the client takes the greatest of the block
            # itself.
            elif not isinstance(spec.dtype, TwoLevel):
                continue
            inputs[name] = max(alike, key=lambda params: float(params.scale))


def _params_of(
    observers: Mapping[str, ActivationObserver],
    least: Callable[[str], float] = lambda name: 0.0,
) -> dict[str, Params]:
    """Return the scales of the tensors that were observed, by layer."""
    params = {name: each.params(least(name)) for name, each in observers.items()}
    # A layer that no sample reached has no entry.
    return {name: scale for name, scale in params.items() if scale is not None}


def _input_hook(observer: ActivationObserver) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        observer.observe(split_input(args, named)[0].detach())

    return hook


def _keys_hook(observer: ActivationObserver, name: str, outputs: int) -> Any:
    """Return a function that observes the rotated keys of a layer, which has some outputs."""

    def hook(keys: torch.Tensor) -> torch.Tensor:
        # (batch, heads, tokens, features): attention may repeat the heads of keys, but a number
        # that is no multiple of the projection's outputs belongs to something else.
        if keys.shape[1] * keys.shape[3] % outputs:
            raise ModelError(
                f"kv_cache: {name} computes {outputs} numbers for a token, which are"
                " not the keys that attention reads; round them where they are"
                " projected (where='projection')",
            )
        observer.observe(keys.detach())
        return keys

    return hook


def _probabilities_hook(observer: ActivationObserver) -> Any:
    def hook(probabilities: torch.Tensor) -> torch.Tensor:
        observer.observe(probabilities.detach())
        return probabilities

    return hook


def _output_hook(observer: ActivationObserver) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        observer.observe(output.detach())

    return hook
