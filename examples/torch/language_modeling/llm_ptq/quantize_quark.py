"""Quantize a language model from the command line, with the arguments of AMD Quark's script of this
name.

    python quantize_quark.py --model_dir MODEL --output_dir OUT --quant_scheme mxfp4 --model_export
    hf_format python quantize_quark.py --model_dir MODEL --output_dir OUT --quant_scheme fp8
    --kv_cache_dtype fp8 --dataset my.txt

MODEL is a Hugging Face folder. Schemes that need calibration data take it from --dataset: a file of
text, a folder of them, token ids (.npy, .npz), or the name of a data set. What becomes of each
argument: docs/from_amd_quark_torch.md.
"""

import argparse
import sys

from quark_onnx.common.errors import QuarkError
from quark_onnx.torch.quantize_quark.arguments import parse
from quark_onnx.torch.quantize_quark.run import main


def arguments() -> argparse.Namespace:
    """Return the arguments of this process."""
    return parse()


if __name__ == "__main__":
    try:
        main()
    except (QuarkError, OSError) as error:
        sys.exit(f"error: {error}")
