"""Rounding inside attention: of keys after RoPE, and of softmax probabilities.

Attention modules of transformers look their attention function up by a name in the configuration.
``install_attention_hooks`` registers a wrapper under another name. The wrapper lets the quantized
layers round keys and probabilities, and calls the original function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quark_onnx.common.containers import grouped_by
from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch.config.torch_config import TorchConfig, matches
from quark_onnx.torch.models.language import outside_language
from quark_onnx.torch.models.names import configs_of, instances
from quark_onnx.torch.models.quantized_layer import Layers, QuantizedLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFIX = "quark_onnx_"
#: The name of attention by softmax, and the function that each model's file defines for it.
_EAGER, _FUNCTION = "eager", "eager_attention_forward"
_SOFTMAX = (
    torch.nn.functional.softmax,
    torch.softmax,
    torch.Tensor.softmax,
    torch.special.softmax,
)


def install_attention_hooks(model: nn.Module, layers: Layers) -> Callable[[], None]:
    """Install hooks in attention that round rotated keys and softmax probabilities.

    Attention passes keys to ``round_keys`` of its layers, and probabilities to
    ``round_probabilities``. Attention continues with the returned tensors.

    Args:
        model: model of transformers; its configurations are changed in place.
        layers: layers by name, with their specs. Hooks are installed for layers whose output is
            rounded after rotation, and for layers that round probabilities.

    Returns:
        A function that removes the hooks.

    Raises:
        ModelError: an attention module of the model calls no attention function of transformers.
    """
    before, rounding = list[tuple[Any, str]](), dict[int, str]()

    def undo() -> None:
        # A configuration that modules share may have been changed twice, for keys and then for
        # probabilities: its first name is restored last.
        for config, name in reversed(before):
            config._attn_implementation = name

    for name, (_, spec) in layers.items():
        if not spec.rotated and spec.probabilities is None:
            continue
        # The parent of a projection is the attention module, whose config names its attention
        # function.
        attention = model.get_submodule(name.rpartition(".")[0])
        config: Any = getattr(attention, "config", None)
        current = getattr(config, "_attn_implementation", None)
        wanted = str(current).removeprefix(_PREFIX)
        try:
            _check(attention, name, current, spec.probabilities is not None)
            if spec.probabilities is not None:
                # sdpa and flash kernels never hold probabilities in a tensor; eager attention calls
                # softmax.
                wanted = _EAGER
                _check_alone(attention, name, rounding)
        except ModelError:
            undo()
            raise
        # Modules that share a configuration find the wrapper's name there already.
        if current != _PREFIX + wanted:
            before.append((config, str(current)))
            config._attn_implementation = _registered(wanted)
    return undo


def _check_alone(attention: nn.Module, name: str, rounding: dict[int, str]) -> None:
    """Raise ModelError if another layer rounds the probabilities of an attention module, too.

    Args:
        rounding: names of such layers by the identity of their module; the layer is added.
    """
    earlier = rounding.setdefault(id(attention), name)
    if earlier != name:
        raise ModelError(
            f"attention: {earlier} and {name} belong to one"
            f" {type(attention).__name__}; name one",
        )


@contextmanager
def attention_function(model: nn.Module, name: str) -> Iterator[None]:
    """Let all attention of a model use one function inside the context.

    Args:
        model: model of transformers; its configurations are changed, and restored.
        name: name of the function among transformers' ``AttentionInterface``.
    """
    before = [(config, config._attn_implementation) for config in configs_of(model)]
    for config, _ in before:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def notes_of(
    model: nn.Module,
    layers: Layers,
    config: TorchConfig,
    kept: Iterable[str],
) -> list[str]:
    """Return notes on keys, values and queries whose scales clients do not use.

    Args:
        model: model of transformers.
        layers: layers by name, with their specs.
        config: configuration from which the layers got their specs.
        kept: names of layers that stay float.

    Returns:
        Sentences for the user.
    """
    # vLLM rounds queries and keys after their norm, while the scale was calibrated before it.
    normalized = grouped_by(
        _normalized_outputs(model, layers), lambda name: name.rpartition(".")[2]
    )
    notes = [
        f"{_ADVICE_ON_NORMS[last]}: {names[0]} is normalized before attention reads it"
        f" ({len(names)} layers are), and vLLM rounds after the norm, with a scale that"
        " was measured before it"
        for last, names in normalized.items()
    ]
    # vision and audio towers attend without a cache
    uncached = frozenset(outside_language(model))
    floats = [
        name for name in kept if matches(name, config.cached) and name not in uncached
    ]
    if floats:
        notes.append(
            f"{floats[0]} stays float, and what it computes ({len(floats)} layers of"
            " keys and values do): vLLM keeps that in fp8 with a scale of 1.0, but for"
            " the blocks that --kv-cache-dtype-skip-layers names",
        )
    rounded = [spec for _, spec in layers.values() if spec.output is not None]
    queries = [spec for spec in rounded if spec.probabilities is not None]
    # Layers that also round probabilities compute queries; all others compute keys and values.
    if queries and len(queries) == len(rounded):
        notes.append(
            "vLLM refuses rounded queries where keys and values are not rounded: round"
            " them, too (kv_cache)",
        )
    return notes


_ADVICE_ON_NORMS = {
    "k_proj": "use --kv-cache fp8-rope for this model",
    "q_proj": "leave out --attention if accuracy suffers in vLLM",
}


#: By projection, the names of a norm of its output next to it: of Qwen 3, and of Phi.
_NORMS = {
    "k_proj": frozenset({"k_norm", "k_layernorm"}),
    "q_proj": frozenset({"q_norm", "q_layernorm"}),
}


def _normalized_outputs(model: nn.Module, layers: Layers) -> Iterator[str]:
    """Yield the layers of rounded keys or queries before a norm of the attention."""
    for name, (_, spec) in layers.items():
        if spec.output is None or spec.rotated:
            continue
        parent, _, last = name.rpartition(".")
        norms = _NORMS.get(last, frozenset())
        if not norms.isdisjoint(dict(model.get_submodule(parent).named_children())):
            yield name


def reinstall_attention_hooks(model: nn.Module) -> None:
    """Install attention hooks for the layers of a model that is quantized already.

    Args:
        model: model with ``QuantizedLayer`` modules, changed in place.

    Raises:
        ModelError: an attention module calls no attention function of transformers.
    """
    # A reloaded model has the attention function of its configuration, which knows no rounding.
    layers = {
        name: (layer, layer.spec)
        for name, layer in instances(model, QuantizedLayer).items()
    }
    install_attention_hooks(model, layers)


def set_attention(model: nn.Module, implementation: str) -> None:
    """Select the attention function of transformers, and keep its rounding.

    Args:
        model: model of transformers, quantized.
        implementation: name of the attention function, such as "eager" or "sdpa".

    Raises:
        ConfigError: probabilities are rounded, and the function computes no probabilities.
    """
    if implementation != _EAGER:
        for name, layer in instances(model, QuantizedLayer).items():
            if layer.spec.probabilities is not None:
                raise ConfigError(
                    f"attention is to be computed by {implementation!r}, but"
                    f" probabilities behind {name} are rounded, which takes {_EAGER!r};"
                    " leave it out",
                )
    cast("PreTrainedModel", model).set_attn_implementation(implementation)
    # set_attn_implementation has overwritten the wrapper's name in all configurations.
    reinstall_attention_hooks(model)


def _check(attention: Any, name: str, function: Any, probabilities: bool) -> None:
    """Raise ModelError if an attention module calls no attention function of transformers.

    Args:
        name: name of a layer of the module, for errors.
        function: name of the module's attention function; None if it has none.
        probabilities: whether probabilities are to be rounded, and not keys alone.
    """
    # The attention interface of transformers: such a model file imports the table of functions, and
    # defines the eager function itself. Others (GPT-J) compute attention in the module.
    code, kind = _code_of(attention), type(attention).__name__
    has_table = function is not None and hasattr(code, "ALL_ATTENTION_FUNCTIONS")
    if probabilities and not (has_table and hasattr(code, _FUNCTION)):
        raise ModelError(
            f"attention: {name} belongs to a {kind}, which computes its probabilities"
            " by no attention function of transformers; leave them as they are"
            " (attention=None)",
        )
    if not has_table:
        raise ModelError(
            f"kv_cache: {name} belongs to a {kind}, which hands its rotated keys to no"
            " attention function of transformers; round them where they are projected"
            " (where='projection')",
        )


def _code_of(module: nn.Module) -> Any:
    """Return the Python module that defines a module's class."""
    return sys.modules[type(module).__module__]


class _Rounded(TorchFunctionMode):
    """Context manager that rounds softmax outputs of the thread in their dtype."""

    def __init__(self, rounded: Callable[[Any], Any]) -> None:
        super().__init__()
        self._rounded = rounded
        self.count = 0

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        # torch suspends the mode in here, so that softmax within softmax is not rounded twice.
        result = func(*args, **(kwargs or {}))
        if func not in _SOFTMAX:
            return result
        self.count += 1
        x = args[0] if args else kwargs["input"]
        # Softmax is often computed in float32 and cast back; attention multiplies the values by
        # probabilities of the model's type.
        return self._rounded(result.to(x.dtype))


def _registered(original: str) -> str:
    """Register a wrapper of a function that rounds keys and probabilities, and return its name."""

    def attend(
        function: Callable[..., Any],
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        *args: Any,
        **named: Any,
    ) -> Any:
        # Keys arrive after RoPE, (batch, heads, tokens, features). At most one layer rounds
        # probabilities (_check_alone).
        rounded = None
        for layer in module.children():
            round_keys = getattr(layer, "round_keys", None)
            if round_keys is not None:
                key = round_keys(key)
            rounded = getattr(layer, "round_probabilities", None) or rounded
        if rounded is None:
            return function(module, query, key, *args, **named)
        with _Rounded(rounded) as mode:
            output = function(module, query, key, *args, **named)
        # A function that exponentiates by itself would leave its probabilities unrounded unnoticed.
        if not mode.count:
            raise ModelError(
                f"attention: a {type(module).__name__} computes its probabilities"
                " without softmax; leave them as they are (attention=None)",
            )
        return output

    register_wrapper(_PREFIX + original, original, attend)
    return _PREFIX + original


def register_wrapper(name: str, original: str, attend: Callable[..., Any]) -> None:
    """Register an attention function of transformers that wraps another.

    Args:
        name: name of the wrapper.
        original: name of the wrapped function.
        attend: function of the wrapped function, of the attention module, and of the other
            arguments of an attention function.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def wrapper(module: nn.Module, *args: Any, **named: Any) -> Any:
        # The table has no entry for eager attention: each model file has a function of its own.
        code = _code_of(module)
        usual = getattr(code, _FUNCTION, None)
        function = code.ALL_ATTENTION_FUNCTIONS.get_interface(original, usual)
        return attend(function, module, *args, **named)

    AttentionInterface.register(name, wrapper)
    # transformers chooses the kind of mask by the name of the attention function.
    if original in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
