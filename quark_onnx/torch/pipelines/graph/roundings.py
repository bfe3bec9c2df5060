"""Rounding in an exported graph: tensors to round, with scales and readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from quark_onnx.common.errors import DataError
from quark_onnx.torch.calibration.block_stream import batches, inference, run_whole
from quark_onnx.torch.calibration.observers import ActivationObserver
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.models.quantized_layer import Rounding
from quark_onnx.torch.pipelines.graph.calls import (
    LayerCalls,
    fused,
    is_float,
    operator_name,
    operator_of,
    root_of,
)
from quark_onnx.torch.runtime import distributed


@dataclass(frozen=True)
class Scale:
    """Scale of one or more tensors.

    Attributes:
        roots: the tensors from which the scale is calibrated.
        spec: the number format and the calibration method.
        least: the least value of the scale.
    """

    roots: tuple[Any, ...]
    spec: TensorSpec
    least: float = 0.0


class Roundings:
    """Rounding operations of a graph, with scales.

    Args:
        module: the graph; only ``put`` changes it.
        layers: the layers to quantize.
        operators: the operator calls to quantize.
        least: the least scale of layer outputs.

    Attributes:
        inputs: the scales of inputs that layers round by themselves, by layer name.
        outputs: the scales of outputs that layers round by themselves, by layer name.
    """

    def __init__(
        self,
        module: GraphModule,
        layers: Mapping[str, tuple[LayerCalls, LayerSpec]],
        operators: Mapping[Any, LayerSpec],
        least: float,
    ) -> None:
        self._module = module
        self._names = dict[Scale, str]()
        self._made = dict[Scale, Rounding]()
        self._places = dict[Scale, str]()
        self._params = dict[Scale, Params]()
        self._behind = dict[Any, Scale]()  # tensors that are rounded for all readers
        # readers, and tensors that are rounded for them
        self._read = list[tuple[Any, Any, Scale]]()
        self.inputs = dict[str, Scale]()
        self.outputs = dict[str, Scale]()
        # layers first: ``_add_operator`` leaves out tensors that a layer rounds already
        for name, (calls, spec) in layers.items():
            self._add_layer(name, calls, spec, least)
        for node, spec in operators.items():
            self._add_operator(node, spec)

    def _add_layer(
        self,
        name: str,
        calls: LayerCalls,
        spec: LayerSpec,
        least: float,
    ) -> None:
        """Add the scales of a layer's input and output.

        Args:
            spec: how it is quantized.
        """
        if spec.input is not None:
            what = f"the input of {name}"
            # one scale for all calls of a layer, which is one module
            self.inputs[name] = self._scale(calls.inputs, spec.input, what)
        if spec.output is not None:
            ends = tuple(map(fused, calls.nodes))
            scale = self._scale(ends, spec.output, f"the output of {name}", least)
            if ends == calls.nodes:
                self.outputs[name] = scale
                for node in ends:
                    # tells ``_rounded`` that readers of the node find rounded values
                    node.meta["rounds"] = (node, scale)
            else:
                # an activation follows, behind which the layer cannot round
                self._behind |= dict.fromkeys(ends, scale)

    def _add_operator(self, node: Any, spec: LayerSpec) -> None:
        """Add the scales of the inputs and the output of an operator call.

        Args:
            spec: quantization of its inputs and of its output.
        """
        name = operator_name(node)
        end = fused(node)
        # a layer that this activation is fused with rounds the same tensor
        if spec.output is not None and end not in self._behind:
            what = f"the output of {name}"
            self._behind[end] = self._scale((end,), spec.output, what)
        if spec.input is not None:
            # indices and shapes are no floats
            for read in node.all_input_nodes:
                if is_float(self._module, read):
                    scale = self._scale((read,), spec.input, f"the input of {name}")
                    self._read.append((node, read, scale))

    def _scale(
        self,
        tensors: Iterable[Any],
        spec: TensorSpec,
        what: str,
        least: float = 0.0,
    ) -> Scale:
        """Return the scale of tensors; a dynamic scale belongs to the tensor itself.

        Args:
            tensors: tensors with a common scale.
            spec: the number format and the calibration method.
            what: the tensors in words, for errors.
            least: the least value of the scale.
        """
        roots = tuple(
            # tensors with the same root have the same values, and so the same scale
            dict.fromkeys(map(root_of, tensors) if spec.measured else tensors),
        )
        scale = Scale(roots, spec, least)
        # equal scales are one; the first reader names it in errors
        self._names.setdefault(scale, what)
        return scale

    def measure(self, data: Iterable[Any] | None) -> None:
        """Calibrate the static scales on the float graph.

        Args:
            data: the calibration samples, of which each process takes its part; None if there are
                none.

        Raises:
            DataError: the data is missing or empty, or a tensor is empty on all samples.
        """
        wanted = {
            scale: what for scale, what in self._names.items() if scale.spec.measured
        }
        if not wanted:
            return
        if data is None:
            raise DataError(
                "scales of activations are to be found, but no calibration data was given",
            )
        data = distributed.own_part(list(batches(data)))
        graph = self._module.graph
        parameter = next(self._module.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        watched, nodes = dict[Scale, ActivationObserver](), list[Any]()
        for scale, what in wanted.items():
            watched[scale] = ActivationObserver(scale.spec, what, device)
            name = f"watch_{len(nodes)}"
            self._module.add_submodule(name, _Watch(watched[scale]))
            nodes += [self._call(name, root) for root in scale.roots]
        self._module.recompile()
        try:
            with inference(self._module):
                run_whole(self._module, data)
        finally:
            for node in nodes:
                graph.erase_node(node)
        for scale, one in watched.items():
            # before the range is computed, as all processes must have the same
            one.over_ranks()
            if (params := one.params(scale.least)) is None:
                raise DataError(f"{wanted[scale]} is empty on all the calibration data")
            self._params[scale] = params

    def module(self, scale: Scale | None) -> Rounding | None:
        """Return the shared rounding module of a scale.

        Args:
            scale: the scale; None for a tensor that is not rounded.

        Returns:
            The module, the same at each call; None without a scale.
        """
        if scale is not None and scale not in self._made:
            self._made[scale] = Rounding(scale.spec, self._params.get(scale))
        return None if scale is None else self._made[scale]

    def put(self) -> None:
        """Insert rounding modules, except where layers round by themselves."""
        for tensor, scale in self._behind.items():
            if not self._rounded(tensor, scale):
                # before the call is inserted, which reads the tensor itself
                readers = list(tensor.users)
                node = self._call(self._place(scale), tensor)
                for reader in readers:
                    reader.replace_input_with(tensor, node)
                node.meta["rounds"] = (tensor, scale)
        # readers with the same scale read one rounded tensor
        done = dict[tuple[Any, Scale], Any]()
        for reader, tensor, scale in self._read:
            source = next(
                # an earlier step may have put a rounded tensor in its place
                each
                for each in reader.all_input_nodes
                if _origin(each) is tensor
            )
            if self._rounded(source, scale):
                continue
            if (source, scale) not in done:
                done[source, scale] = self._call(self._place(scale), source)
                done[source, scale].meta["rounds"] = (tensor, scale)
            reader.replace_input_with(source, done[source, scale])

    def _rounded(self, node: Any, scale: Scale) -> bool:
        """Return whether a tensor is already rounded by a scale.

        Args:
            node: the tensor, which is followed back through operators that move values.

        Returns:
            True or False; False for dynamic scales.
        """
        while (
            operator_of(node)
            and root_of(node) is not node
            and "rounds" not in node.meta
        ):
            node = node.args[0]
        rounds = node.meta.get("rounds")
        # dynamic scales of moved values differ, for example per token of a transposed tensor
        return rounds is not None and scale.spec.measured and rounds[1] == scale

    def _place(self, scale: Scale) -> str:
        """Return the name of the submodule that rounds by a scale."""
        if scale not in self._places:
            name = place = f"{scale.roots[0].name.rstrip('_')}_rounding"
            count = 0
            # names of nodes may be those of modules
            while hasattr(self._module, place):
                count += 1
                place = f"{name}_{count}"
            rounding = self.module(scale)
            assert rounding is not None
            self._module.add_submodule(place, rounding)
            self._places[scale] = place
        return self._places[scale]

    def _call(self, name: str, tensor: Any) -> Any:
        """Insert a call of a module directly after a tensor."""
        graph = self._module.graph
        behind = tensor
        # placeholders have to come first in a graph
        if tensor.op in ("get_attr", "placeholder"):
            for node in graph.nodes:
                if node is tensor or node.op == "placeholder":
                    behind = node
        with graph.inserting_after(behind):
            return graph.call_module(name, (tensor,))


def _origin(node: Any) -> Any:
    """Return the tensor that a node rounds, or else the node."""
    return node.meta["rounds"][0] if "rounds" in node.meta else node


class _Watch(nn.Module):
    """Module that passes a tensor to an observer."""

    def __init__(self, watched: ActivationObserver) -> None:
        super().__init__()
        self._watched = watched

    def forward(self, x: torch.Tensor) -> None:
        """Observe a tensor."""
        self._watched.observe(x.detach())
