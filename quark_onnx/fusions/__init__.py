"""Write operators that compute on integer codes in place of nodes between Q/DQ pairs."""

from quark_onnx.fusions.base import Fusion
from quark_onnx.fusions.dynamic import (
    attention_integer,
    conv_integer,
    lstm_integer,
    matmul_integer,
    portable_conv_integer,
)
from quark_onnx.fusions.embedding import q_embed_layer_normalization
from quark_onnx.fusions.gather import gather_codes
from quark_onnx.fusions.moving import (
    MOVING,
    clip_codes,
    drop_rounding_again,
    move_codes,
    rank_codes,
)
from quark_onnx.fusions.nbits import matmul_nbits
from quark_onnx.fusions.pointwise import (
    qlinear_average_pool,
    qlinear_concat,
    qlinear_elementwise,
    qlinear_global_average_pool,
    qlinear_softmax,
    qlinear_where,
)
from quark_onnx.fusions.qlinear import (
    matmul_to_float,
    qgemm,
    qlinear_conv,
    qlinear_matmul,
)
from quark_onnx.patterns.quantized_attention import ATTENTION

#: Fusions to try for each operator type, in order.
FUSIONS: dict[str, tuple[Fusion, ...]] = {
    **dict.fromkeys(MOVING, (move_codes,)),
    **dict.fromkeys(("Add", "Mul", "Sigmoid", "LeakyRelu"), (qlinear_elementwise,)),
    **dict.fromkeys(
        ("GlobalAveragePool", "ReduceMean"),
        (qlinear_global_average_pool,),
    ),
    **dict.fromkeys(("Relu", "Clip"), (clip_codes,)),
    "ArgMax": (rank_codes,),
    # Blocks and dynamic scales first: the other two take a static scale per tensor or channel.
    "MatMul": (matmul_nbits, matmul_integer, qlinear_matmul, matmul_to_float),
    "Gemm": (matmul_nbits, matmul_integer, qgemm),
    "Conv": (conv_integer, qlinear_conv),
    "LSTM": (lstm_integer,),
    "com.microsoft::EmbedLayerNormalization": (q_embed_layer_normalization,),
    ATTENTION: (attention_integer,),
    "Gather": (move_codes, gather_codes),
    "Concat": (move_codes, qlinear_concat),
    "Where": (move_codes, qlinear_where),
    "Softmax": (qlinear_softmax,),
    "AveragePool": (qlinear_average_pool,),
    "QuantizeLinear": (drop_rounding_again,),
}

#: The same, without operators that only serve onnxruntime's speed.
PORTABLE_FUSIONS = FUSIONS | {"Conv": (portable_conv_integer, qlinear_conv)}

#: Integer products that fusions write; the codes of the first factor are the first input.
INTEGER_PRODUCTS = frozenset(
    {"QLinearConv", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat"},
)

__all__ = ["FUSIONS", "INTEGER_PRODUCTS", "PORTABLE_FUSIONS", "Fusion"]
