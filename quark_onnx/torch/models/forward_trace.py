"""Trace of a model's forward on the meta device: which layers it calls, and in which order."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from quark_onnx.torch.models.experts import ParallelExperts
from quark_onnx.torch.models.mixtures import stacks_of
from quark_onnx.torch.models.structure import layers_of

logger = logging.getLogger(__name__)

#: Tokens of the sample; more than the kernels of short convolutions.
_TOKENS = 8
#: Samples of audio at 16 kHz: half a second.
_AUDIO = 8000


@dataclass(frozen=True)
class ForwardTrace:
    """Layers that a forward calls.

    Attributes:
        called: names of the layers in the order of their first calls. Layers of experts are left
            out.
        read_directly: names of the layers whose weight is read while the layer itself is not
            called.
        is_whole: whether the forward ran to its end.
    """

    called: tuple[str, ...] = ()
    read_directly: frozenset[str] = frozenset()
    is_whole: bool = False


#: By what decides about a forward: configuration, classes of the modules, and layers with the owner
#: of each weight. No model is kept alive.
_known = dict[tuple[Any, ...], ForwardTrace]()


def forward_trace(model: nn.Module) -> ForwardTrace:
    """Trace the forward of a model of transformers.

    A copy of the model without weights runs on the meta device, where nothing is computed. The
    trace ends early where a forward depends on values, and is empty for other models, whose inputs
    are not known. Models of one class, configuration and structure are traced once.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "main_input_name") or not hasattr(config, "to_dict"):
        return ForwardTrace()
    # tied weights have one owner, the first layer
    owners = dict[int, str]()
    layers = tuple(
        (name, owners.setdefault(id(layer._parameters.get("weight")), name))
        for name, (layer, _) in layers_of(model).items()
    )
    modules = tuple(type(module) for module in model.modules())
    key = (repr(config.to_dict()), modules, layers)
    if key not in _known:
        _known[key] = _traced(model)
    return _known[key]


def never_called(model: nn.Module) -> frozenset[str]:
    """Return the names of the layers whose weight is read while no forward calls them.

    Mamba multiplies the weight of ``dt_proj`` itself.
    """
    trace = forward_trace(model)
    return trace.read_directly.difference(trace.called)


def _traced(model: Any) -> ForwardTrace:
    watch = _Watch()
    is_whole = False
    try:
        twin = _meta_twin(model)
        for name, (layer, _) in layers_of(twin).items():
            watch.add(name, layer)
        inputs = _sample_inputs(twin)
        with torch.no_grad(), warnings.catch_warnings(), watch:
            warnings.simplefilter("ignore")
            twin(**inputs)
        is_whole = True
    # Remote code may raise any exception, as does torch where values are needed.
    except Exception as error:
        logger.debug("the trace of %s ends early: %s", type(model).__name__, error)
    return ForwardTrace(tuple(watch.called), frozenset(watch.read), is_whole)


def further_inputs(model: Any) -> list[str]:
    """Return the inputs that a sequence-to-sequence model needs besides token ids, or instead.

    Empty for a model that runs on token ids alone. Some, such as BART, make the decoder's token ids
    of the encoder's.
    """
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return []
    if model.main_input_name != "input_ids":
        return [model.main_input_name, "decoder_input_ids"]
    twin = _meta_twin(model)
    ids = _sample_inputs(twin)["input_ids"]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            twin(input_ids=ids)
    # transformers raises this for missing arguments
    except ValueError as error:
        logger.debug("%s on token ids alone: %s", type(model).__name__, error)
        return ["input_ids", "decoder_input_ids"]
    # The forward of other models may need values, which the meta device lacks.
    except Exception as error:
        logger.debug("the trial of %s ends early: %s", type(model).__name__, error)
    return []


class _Watch(TorchDispatchMode):
    """Record calls of layers, and operators that read a layer's weight outside of its call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        #: A dictionary keeps the order of the first calls.
        self.called = dict[str, None]()
        self.read = set[str]()
        self._active: list[str] = []
        #: Tied weights belong to several layers.
        self._owners = dict[int, set[str]]()

    def add(self, name: str, layer: Any) -> None:
        """Watch a layer."""
        self._owners.setdefault(id(layer.weight), set()).add(name)

        def begin(*_: Any) -> None:
            self._active.append(name)
            self.called.setdefault(name)

        def end(*_: Any) -> None:
            self._active.pop()

        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for arg in args:
            # operators such as cat take lists of tensors
            for tensor in arg if isinstance(arg, list | tuple) else (arg,):
                owners = self._owners.get(id(tensor), set())
                if owners.isdisjoint(self._active):
                    self.read |= owners
        return func(*args, **(kwargs or {}))


def _meta_twin(model: Any) -> Any:
    """Return a copy of a model on the meta device, whose stacks of experts return zeros.

    Tensors are not copied, so that the copy takes no memory.
    """
    # ``deepcopy`` takes from the memo what is there already, and keeps tied parameters tied.
    memo = dict[int, Any]()
    for name in stacks_of(model):
        stack = model.get_submodule(name)
        # a list of experts has no forward
        if type(stack).forward is not nn.ModuleList.forward:
            memo[id(stack)] = _stand_in(stack)
    stand_ins = {id(stand_in) for stand_in in memo.values()}
    for module in list(_modules_outside(model, memo.keys())):
        tensors = [*module._parameters.values(), *module._buffers.values()]
        tensors += vars(module).values()
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(tensor.to("meta"), requires_grad=False)
                memo.setdefault(id(tensor), empty)
            elif isinstance(tensor, torch.Tensor):
                memo.setdefault(id(tensor), tensor.to("meta"))
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        # hooks of the caller and of accelerate, which belong to the model itself
        if id(module) not in stand_ins:
            vars(module).pop("forward", None)
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    twin.eval()
    return twin


def _modules_outside(module: Any, stacks: Container[int]) -> Iterator[Any]:
    """Yield a module and its descendants without stacks of experts, which are named by identity."""
    yield module
    for child in module.children():
        if id(child) not in stacks:
            yield from _modules_outside(child, stacks)


def _stand_in(stack: Any) -> Any:
    """Return a stack of experts that returns zeros: which experts run depends on values."""
    stand_in = copy.copy(stack)
    stand_in._parameters, stand_in._buffers, stand_in._modules = {}, {}, {}
    # whole experts return hidden states, a stack of one projection has its own number of outputs
    outputs: int | None = None
    if isinstance(stack, ParallelExperts):
        # the weight of a quantized layer is no parameter
        expert: Any = stack.get_submodule("0")
        outputs = len(expert.weight)

    def forward(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        width = hidden.shape[-1] if outputs is None else outputs
        return hidden.new_zeros((*hidden.shape[:-1], width))

    stand_in.forward = forward
    return stand_in


def _sample_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Return the arguments of a forward with one sample, on the meta device."""
    config = model.config
    ids = torch.ones(1, _TOKENS, dtype=torch.long, device="meta")
    kind = model.main_input_name
    if kind == "input_ids":
        inputs = {kind: ids}
    elif kind == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        inputs = {
            kind: torch.zeros(1, config.num_channels, height, width, device="meta")
        }
    elif kind == "input_features":
        # two frames per position, as in Whisper
        frames = 2 * config.max_source_positions
        inputs = {kind: torch.zeros(1, config.num_mel_bins, frames, device="meta")}
    else:
        inputs = {kind: torch.zeros(1, _AUDIO, device="meta")}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    return inputs
