"""Define the block formats: BFP16, MX4, MX6 and MX9, and OCP Microscaling.

The nodes are those of AMD's domain, with the attributes of AMD's presets. All attributes are set
because defaults differ between releases. Rounding mode 2 is half to even.
"""

from typing import Any

from quark_onnx.common.registry import DTYPES
from quark_onnx.dtypes.base import Block

#: Opset of the operators in the function bodies of the nodes.
BODY_OPSET = 17


def _bfp(name: str, method: str, bits: int, block: int) -> None:
    attributes = {
        "bfp_method": method,
        "bit_width": bits,
        "block_size": block,
        # Half to even, as AMD's presets have it.
        "rounding_mode": 2,
        # Used by bfp_prime alone: pairs of values share a bit that shifts their exponent.
        "sub_block_size": 2,
        "sub_block_shift_bits": 1,
        "convert_to_bfloat_before_bfp": 0,
    }
    _block(name, bits, "BFPQuantizeDequantize", attributes)


def _mx(name: str, element: str, bits: int) -> None:
    # OCP Microscaling 1.0: 32 elements share a scale of 8 bits (E8M0).
    attributes = {"element_dtype": element, "block_size": 32, "rounding_mode": 2}
    _block(name, bits, "MXQuantizeDequantize", attributes)


def _block(name: str, bits: int, op_type: str, attributes: dict[str, Any]) -> None:
    block = attributes["block_size"]
    row = Block(name, bits, BODY_OPSET, op_type, tuple(attributes.items()), block)
    DTYPES.add(name, row)


_bfp("bfp16", "to_bfp", 16, 8)
# The bit width counts the shared exponent of 8 bits.
_bfp("mx4", "to_bfp_prime", 11, 16)
_bfp("mx6", "to_bfp_prime", 13, 16)
_bfp("mx9", "to_bfp_prime", 16, 16)
_mx("mxfp8e4m3", "fp8_e4m3", 8)
_mx("mxfp8e5m2", "fp8_e5m2", 8)
_mx("mxfp6e3m2", "fp6_e3m2", 6)
_mx("mxfp6e2m3", "fp6_e2m3", 6)
_mx("mxfp4e2m1", "fp4_e2m1", 4)
_mx("mxint8", "int8", 8)
