"""``python -m quark_onnx.onnx.tools.convert_u16s8_to_s16s8``.

See the row of that name in ``table``.
"""

import sys

from quark_onnx.onnx.tools.table import main

if __name__ == "__main__":
    sys.exit(main("convert_u16s8_to_s16s8"))
