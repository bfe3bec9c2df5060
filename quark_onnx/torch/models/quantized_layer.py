"""Quantized layers, with integer codes as state and dequantized values in products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from quark_onnx.torch.config.number_formats import TwoLevel
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.quantized_tensor import Quantized, fake_quantize
from quark_onnx.torch.models.plain_linear import is_plain_linear

#: Layers by their names in the model, each with the specification of its quantization.
Layers = Mapping[str, tuple[Any, LayerSpec]]


class _Coded(nn.Module):
    """Module with buffers that move between devices and keep the dtype.

    A cast of the model must not cast integer codes.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in before.items():
            moved = self._buffers[name]
            if tensor is None or moved is None:
                continue
            # From the tensor before the cast: the way through another dtype may lose bits.
            if moved.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(moved.device)
        return self


class Rounding(_Coded):
    """Rounding of an activation, with a calibrated scale or a dynamic scale.

    Args:
        spec: how the activation is quantized.
        params: calibrated scale and zero point; None for dynamic quantization. For NVFP4, ``scale``
            is the global scale.
    """

    scale: torch.Tensor | None
    zero: torch.Tensor | None

    def __init__(self, spec: TensorSpec, params: Params | None = None) -> None:
        super().__init__()
        self.spec = spec
        scale, zero = params or Params(None)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)

    @classmethod
    def of(cls, spec: TensorSpec | None, params: Params | None) -> Rounding | None:
        """Return the rounding of a tensor; None for a float tensor.

        Args:
            spec: how the tensor is quantized; None for a float tensor.
            params: calibrated scale and zero point; None for dynamic quantization.
        """
        return None if spec is None else cls(spec, params)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the dequantized activation."""
        # Dynamic quantization: the scale follows from each input.
        if self.scale is None:
            return fake_quantize(x, self.spec)
        if isinstance(self.spec.dtype, TwoLevel):
            return fake_quantize(x, self.spec, whole=self.scale)
        return fake_quantize(x, self.spec, Params(self.scale, self.zero))

    def extra_repr(self) -> str:
        """Return the specification of the activation, for the printed module."""
        return str(self.spec)


class QuantizedLayer(_Coded):
    """Layer with integer codes as weight; activations are rounded as its spec demands.

    Codes and scales are buffers and part of the state. A cast of the model changes the compute
    dtype, and leaves codes and scales unchanged.

    Args:
        layer: float layer. Its bias is shared; its weight is not kept.
        weight: quantized weight, or None if the weight stays float.
        spec: how the layer is quantized.
        input: calibrated scale of the input, if any.
        output: calibrated scale of the output, if any.
        probabilities: calibrated scale of attention probabilities, if any.

    Attributes:
        origin: class of the float layer, as named by ``kind_of``.
    """

    codes: torch.Tensor | None
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    whole: torch.Tensor | None
    factor: torch.Tensor | None

    def __init__(  # noqa: PLR0913
        self,
        layer: Any,
        weight: Quantized | None,
        spec: LayerSpec,
        input: Params | None = None,
        output: Params | None = None,
        probabilities: Params | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        # Registered first: the setter below then assigns buffers, which move with the model.
        for name in _PARTS:
            self.register_buffer(name, None)
        self.quantized = weight
        kind = kind_of(layer)
        assert kind is not None
        self.origin = kind
        self._turned = kind == "Conv1D"
        # the weight of a Conv1D has outputs first here
        self.kind = "Linear" if self._turned else kind
        self.float_weight: Any = None
        if weight is None:
            self.float_weight = layer.weight
        # Embeddings have no bias.
        self.bias = getattr(layer, "bias", None)
        self.input = Rounding.of(spec.input, input)
        self.output = Rounding.of(spec.output, output)
        self.probabilities = Rounding.of(spec.probabilities, probabilities)
        # Gemma 3 has a tensor as factor, which moves with the model; Bart has a number.
        factor: Any = 1.0
        if kind == "Embedding":
            factor = getattr(layer, "embed_scale", factor)
        tensor = factor if isinstance(factor, torch.Tensor) else None
        self.register_buffer("factor", tensor, persistent=False)
        #: Factor of the rows of an embedding, if it is no tensor.
        self._factor: Any = factor if tensor is None else 1.0
        #: Padding of a convolution, as ``torch.nn.functional.pad`` takes it.
        self._padding: Any = getattr(layer, "_reversed_padding_repeated_twice", None)
        self._settings: dict[str, Any] = {
            name: getattr(layer, name) for name in _SETTINGS.get(self.kind, ())
        }
        self.shape = tuple(layer.weight.shape)
        if self._turned:
            self.shape = self.shape[::-1]

    @property
    def quantized(self) -> Quantized | None:
        """Codes and scales of the weight, unless the weight is float or dropped."""
        if self.codes is None or self.spec.weight is None:
            return None
        return Quantized(
            self.spec.weight,
            self._coded,
            self.codes,
            self.scale,
            self.zero,
            whole=self.whole,
            dtype=self._dtype,
        )

    @quantized.setter
    def quantized(self, weight: Quantized | None) -> None:
        for name in _PARTS:
            setattr(self, name, None if weight is None else getattr(weight, name))
        if weight is not None:
            self._coded, self._dtype = weight.shape, weight.dtype

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.codes is not None:
            # An empty tensor shows which dtype ``fn`` gives to weights; codes themselves never
            # change.
            self._dtype = fn(
                torch.empty(0, dtype=self._dtype, device=self.codes.device),
            ).dtype
        return super()._apply(fn, recurse)

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight, in the shape of the float layer's weight."""
        if (quantized := self.quantized) is None:
            weight: torch.Tensor = self.float_weight
            return weight.t() if self._turned else weight
        return outputs_first(quantized.dequantize(), self.kind)

    def forward(self, *args: Any, **named: Any) -> torch.Tensor:
        """Compute the float layer's function of dequantized operands.

        The arguments are the arguments of the float layer.
        """
        input, more, named = split_input(args, named)
        # Embeddings read indices, which cannot be rounded.
        if self.input is not None and self.kind not in ("Embedding", "EmbeddingBag"):
            input = self.input(input)
        return self.rounded(self.compute(input, self.weight, more, named))

    def rounded(self, found: torch.Tensor) -> torch.Tensor:
        """Return the layer's output after rounding.

        Keys that attention rounds after RoPE stay float here.

        Args:
            found: the output of ``compute``.
        """
        if self.output is None or self.spec.rotated:
            return found
        rounded: torch.Tensor = self.output(found)
        return rounded

    @property
    def round_keys(self) -> Rounding | None:
        """Module that rounds rotated keys, if the layer computes keys."""
        return self.output if self.spec.rotated else None

    @property
    def round_probabilities(self) -> Rounding | None:
        """The module by which attention rounds probabilities.

        None if the scale of the probabilities belongs to another layer.
        """
        return self.probabilities

    def compute(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        more: Sequence[Any],
        named: Mapping[str, Any],
    ) -> torch.Tensor:
        """Compute the float layer's function with another weight, without rounding.

        Args:
            x: input of the layer.
            weight: weight in the shape of the float layer's weight.
            more: further positional arguments, such as offsets of bags or the output size of a
                transposed convolution.
            named: further keyword arguments.

        Returns:
            The output of the layer.
        """
        names = _ARGUMENTS.get(self.kind, ())
        # ``more`` may be shorter than the names: the other arguments keep their defaults.
        given = {**named, **dict(zip(names, more, strict=False))}
        arguments = {name: given[name] for name in names if name in given}
        return _FUNCTIONS[self.kind](self, x, weight, **arguments)

    def _embedding(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(x, weight, **self._settings)
        if self.factor is not None:
            return rows * self.factor.to(rows.dtype)
        return rows if self._factor == 1.0 else rows * self._factor

    def _embedding_bag(
        self, x: torch.Tensor, weight: torch.Tensor, **bags: Any
    ) -> torch.Tensor:
        return F.embedding_bag(x, weight, **bags, **self._settings)

    def _conv(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        settings = dict(self._settings)
        mode = settings.pop("padding_mode")
        # As nn.Conv2d does: F.conv2d pads with zeros alone.
        if mode != "zeros":
            x = F.pad(x, self._padding, mode=mode)
            settings["padding"] = 0
        return F.conv2d(x, weight, self.bias, **settings)

    def _conv_transpose(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        output_size: Sequence[int] | None = None,
    ) -> torch.Tensor:
        settings = dict(self._settings)
        if output_size is not None:
            settings["output_padding"] = self._extra(x, weight, output_size)
        return F.conv_transpose2d(x, weight, self.bias, **settings)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, self.bias)

    def _extra(
        self, x: torch.Tensor, weight: torch.Tensor, size: Sequence[int]
    ) -> list[int]:
        """Return the output padding of a transposed convolution for an output size.

        Height and width are the last two axes of the input, of the kernel and of the size, which
        may include batch and channels.
        """
        settings = [self._settings[name] for name in ("stride", "padding", "dilation")]
        axes = zip(size[-2:], x.shape[-2:], weight.shape[-2:], *settings, strict=True)
        paddings = list[int]()
        for wanted, length, kernel, stride, pad, dilation in axes:
            # The output length without output padding (docs of nn.ConvTranspose2d).
            least = (length - 1) * stride - 2 * pad + dilation * (kernel - 1) + 1
            paddings.append(wanted - least)
        return paddings

    def extra_repr(self) -> str:
        """Return kind, shape and weight specification of the layer, for the printed module."""
        return f"{self.kind} {list(self.shape)}, weight={self.spec.weight}"


#: Functions of float layers by their kind.
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "Linear": QuantizedLayer._linear,
    "Embedding": QuantizedLayer._embedding,
    "EmbeddingBag": QuantizedLayer._embedding_bag,
    "Conv2d": QuantizedLayer._conv,
    "ConvTranspose2d": QuantizedLayer._conv_transpose,
}
#: Arguments of a layer's forward after the input, by its kind.
_ARGUMENTS = {
    "EmbeddingBag": ("offsets", "per_sample_weights"),
    "ConvTranspose2d": ("output_size",),
}
#: The tensors of a weight.
_PARTS = ("codes", "scale", "zero", "whole")
#: Attributes of layers that are arguments of the functions of ``torch.nn.functional``.
_SETTINGS = {
    "Embedding": (
        "padding_idx",
        "max_norm",
        "norm_type",
        "scale_grad_by_freq",
        "sparse",
    ),
    "EmbeddingBag": (
        "max_norm",
        "norm_type",
        "scale_grad_by_freq",
        "mode",
        "sparse",
        "include_last_offset",
        "padding_idx",
    ),
    "Conv2d": ("stride", "padding", "dilation", "groups", "padding_mode"),
    "ConvTranspose2d": ("stride", "padding", "output_padding", "groups", "dilation"),
}


def split_input(
    args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Split the arguments of a layer into the input and further arguments.

    The input is the first argument. A layer may be called by keyword, under any name that its class
    gives to the input.

    Args:
        args: the positional arguments.
        named: the keyword arguments.

    Returns:
        The input, further positional arguments, and further keyword arguments.

    >>> split_input((1, 2), {}), split_input((), {"x": 1, "size": 2})
    ((1, (2,), {}), (1, (), {'size': 2}))
    """
    if args:
        return args[0], args[1:], dict(named)
    further = dict(named)
    # The input comes first among keywords, too, where a class gives it another name.
    name = "input" if "input" in further else next(iter(further))
    return further.pop(name), (), further


def kind_of(module: nn.Module) -> str | None:
    """Return the name of the layer class by which a module can be quantized.

    A subclass counts as its base class if both compute the same function: the forward is inherited,
    or the class is a Linear whose forward is a plain matrix product (``is_plain_linear``). The
    scaled embedding of transformers (Gemma, Bart) counts as Embedding.

    Returns:
        "Linear", "Conv1D", "Conv2d", "ConvTranspose2d", "Embedding" or "EmbeddingBag"; None for
        modules that are not quantized.
    """
    if is_scaled_embedding(module):
        return "Embedding"
    cls = _base_of(module)
    if cls is not None and _computes_as(module, cls):
        return str(cls.__name__)
    # transformers' own: a Linear whose weight has inputs first
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return "Conv1D"
    return None


def _computes_as(module: nn.Module, base: type[nn.Module]) -> bool:
    """Return whether a module computes the same function as its base class."""
    if type(module).forward is base.forward:
        return True
    return base is nn.Linear and is_plain_linear(module)


def is_scaled_embedding(module: nn.Module) -> bool:
    """Return whether a module is an embedding with a factor ``embed_scale``."""
    named = type(module).__name__.endswith("ScaledWordEmbedding")
    return named and isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")


def unlike_its_base(module: nn.Module) -> str | None:
    """Return why a subclass cannot be quantized as its base class, or None.

    Returns:
        A clause for the user; None for layers that can be quantized, and for other modules.
    """
    cls = _base_of(module)
    if cls is None or kind_of(module) is not None:
        return None
    return (
        f"it is a {type(module).__name__}, which computes something else than the"
        f" {cls.__name__} that it derives from"
    )


def _base_of(module: nn.Module) -> Any:
    """Return the base class of a module among the layer classes, or None."""
    bases = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.Embedding, nn.EmbeddingBag)
    return next((base for base in bases if isinstance(module, base)), None)


def outputs_first(weight: torch.Tensor, kind: str | None) -> torch.Tensor:
    """Return a view of a weight with its output channels on axis 0.

    The function is its own inverse.

    Args:
        weight: weight of a layer, of two axes or more.
        kind: kind of the layer, as named by ``kind_of``.
    """
    if kind not in ("ConvTranspose2d", "Conv1D"):
        return weight
    # Transposed convolutions and Conv1D store (inputs, outputs, ...).
    return weight.transpose(0, 1)


def inputs_of(module: Any) -> int:
    """Return the length of the last axis of a layer's weight with its outputs first.

    For a Linear layer these are its inputs, which groups divide.
    """
    return int(outputs_first(module.weight, kind_of(module)).shape[-1])
