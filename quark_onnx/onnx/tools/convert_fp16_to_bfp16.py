"""``python -m quark_onnx.onnx.tools.convert_fp16_to_bfp16``.

See the row of that name in ``table``.
"""

import sys

from quark_onnx.onnx.tools.table import main

if __name__ == "__main__":
    sys.exit(main("convert_fp16_to_bfp16"))
