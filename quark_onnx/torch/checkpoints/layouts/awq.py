"""AutoAWQ's layout, version "gemm": 4-bit integers with inputs first.

Eight outputs are packed to an int32 in AutoAWQ's order. Zero points are always stored; the zero
point of symmetric codes is the middle of the range. Scales are float16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.checkpoints.entries import names_in
from quark_onnx.torch.checkpoints.layouts.base import (
    Layout,
    check_parts_of_names,
    from_unsigned,
    group_sizes,
    in_columns,
    in_half,
    part_of,
    small_integers,
    the_one,
    unsigned,
    with_scales,
)
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.bit_packing import pack_nibbles, unpack_nibbles
from quark_onnx.torch.formats.quantized_tensor import Quantized

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AwqLayout(Layout):
    """AutoAWQ's layout."""

    name: ClassVar[str] = "awq"
    method: ClassVar[str] = "awq"
    parts: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")

    def refusal(self, spec: LayerSpec) -> str:
        """Return why a layer is not weight-only with 4-bit integers; empty if it is.

        The integers have per-group or per-channel scales. Signed and unsigned integers, with or
        without zero points, are supported: all are stored as unsigned codes with zero points.
        """
        return small_integers(spec)

    def adapted(self, config: TorchConfig) -> TorchConfig:
        """Return the configuration with weight scales in float16, the type of ``scales`` in files.

        Codes are then chosen for the scales that are stored. A type of scales that a user has
        chosen stays, and ``stored`` rounds such scales to float16.
        """
        return with_scales(config, "float16")

    def check_layer(
        self,
        name: str,
        kind: str,
        spec: LayerSpec,
        shape: tuple[int, ...],
    ) -> None:
        """Raise ConfigError unless a layer is a Linear that packs without padding.

        The number of inputs must be a multiple of the group size, and the number of outputs a
        multiple of 8, since ``qweight`` packs eight outputs to an int32.
        """
        super().check_layer(name, kind, spec, shape)
        # Eight nibbles fill an int32, and the outputs are packed without padding.
        if shape[0] % 8:
            raise ConfigError(
                f"{name} has {shape[0]} outputs, and the layout 'awq' puts eight into a"
                " number; exclude it, or choose the layout 'compressed-tensors'",
            )

    def quantization_config(
        self,
        quantized: Mapping[str, LayerSpec],
        floats: Sequence[str],
        config: TorchConfig,
    ) -> dict[str, Any]:
        """Return the keys of AutoAWQ's version "gemm", which vLLM's auto_awq.py reads.

        All layers share ``group_size``; -1 stands for one scale per output. ``zero_point`` is true
        also for symmetric codes. ``modules_to_not_convert`` lists the float layers, or is null.

        Raises:
            ConfigError: layers differ in group size, no layer is quantized, or the name of a float
                layer is part of the name of a quantized layer.
        """
        check_parts_of_names(self.name, quantized, floats)
        # A group size of -1 means one scale for an output.
        sizes = group_sizes(quantized, ungrouped=-1)
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": the_one(self.name, "blocks of", sizes),
            "zero_point": True,
            "modules_to_not_convert": list(floats) or None,
        }

    def stored(self, weight: Quantized, spec: LayerSpec) -> dict[str, Any]:
        """Return a weight as unsigned 4-bit codes with inputs first, in AutoAWQ's order of nibbles.

        Returns:
            ``qweight``: int32 (inputs, outputs / 8); ``qzeros``: int32 (groups, outputs / 8), which
            holds 8 for symmetric codes; ``scales``: float16 (groups, outputs). Per-channel scales
            are a single group.

        Raises:
            ConfigError: float16 cannot represent the scales.
        """
        codes, zero = unsigned(weight)
        return {
            # Shape (inputs, outputs / 8): eight neighbouring outputs share an int32.
            "qweight": pack_nibbles(codes.t()),
            # (blocks, outputs / 8) and (blocks, outputs).
            "qzeros": pack_nibbles(zero.t()),
            "scales": in_half(in_columns(weight.scale, weight).t().contiguous()),
        }

    def restored(
        self,
        parts: Mapping[str, Any],
        spec: LayerSpec,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Quantized:
        """Return the weight from ``qweight``, ``qzeros`` and ``scales``, outputs first.

        Zero points become None if all are 0 after conversion to the codes of ``spec.weight``.

        Raises:
            ModelError: one of the three tensors is missing.
        """
        assert spec.weight is not None
        words = part_of(parts, "qweight")
        zeros = part_of(parts, "qzeros")
        scales = part_of(parts, "scales")
        # Back to outputs first: codes (outputs, inputs) and zero points (outputs, blocks).
        return from_unsigned(
            unpack_nibbles(words, shape[0]).t().contiguous(),
            unpack_nibbles(zeros, shape[0]).t().contiguous(),
            scales.t().contiguous(),
            spec.weight,
            (shape, dtype),
        )

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> tuple[TorchConfig, Layout]:
        """Return the configuration of AutoAWQ's ``quantization_config``, and the layout.

        The weights are read as asymmetric uint4, also those written from symmetric codes. A name in
        ``modules_to_not_convert`` becomes a glob that matches the name within longer names, as
        clients do.

        Raises:
            ConfigError: ``bits`` is not 4, ``version`` is not "gemm" (in any letter case),
                ``group_size`` is neither -1 nor positive, or ``modules_to_not_convert`` is not a
                list of names.
        """
        # AutoAWQ's own files have GEMM, and config.json has gemm.
        bits, version = found.get("bits"), str(found.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise ConfigError(
                f"quantization_config has bits {bits!r} and version {version!r}; this"
                " reads 4 and 'gemm'",
            )
        size = found.get("group_size")
        # isinstance would accept True as an int.
        if type(size) is not int or size < -1 or size == 0:
            raise ConfigError(
                f"quantization_config has group_size {size!r}; it must be a number of"
                " values, or -1",
            )
        weight = TensorSpec(
            "uint4",
            symmetric=False,
            scale="float16",
            # A size of -1 means one scale for an output.
            per_channel=size <= 0,
            block_size=max(0, size),
        )
        # Clients look for these names within the names of layers.
        floats = tuple(
            f"*{name}*" for name in names_in(found, "modules_to_not_convert")
        )
        return TorchConfig(LayerSpec(weight), exclude=floats), cls()
