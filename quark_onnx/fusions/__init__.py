"""Operators that compute on codes, written in place of nodes between Q/DQ pairs."""

from quark_onnx.fusions.base import Fusion
from quark_onnx.fusions.dynamic import conv_integer, matmul_integer
from quark_onnx.fusions.gather import gather_codes
from quark_onnx.fusions.nbits import matmul_nbits

#: What is tried for each operator type, in this order.
FUSIONS: dict[str, tuple[Fusion, ...]] = {
    "MatMul": (matmul_nbits, matmul_integer),
    "Gemm": (matmul_nbits, matmul_integer),
    "Conv": (conv_integer,),
    "Gather": (gather_codes,),
}

__all__ = ["FUSIONS", "Fusion", "conv_integer", "gather_codes", "matmul_integer", "matmul_nbits"]
