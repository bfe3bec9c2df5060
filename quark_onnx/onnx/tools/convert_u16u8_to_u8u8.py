"""``python -m quark_onnx.onnx.tools.convert_u16u8_to_u8u8``.

The table in ``quark_onnx.onnx.tools.table`` describes the tool.
"""

import sys

from quark_onnx.onnx.tools.table import main

if __name__ == "__main__":
    sys.exit(main("convert_u16u8_to_u8u8"))
