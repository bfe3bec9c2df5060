"""``python -m quark_onnx.onnx.tools.convert_onnx_to_onnxtxt``.

See the row of that name in ``table``.
"""

import sys

from quark_onnx.onnx.tools.table import main

if __name__ == "__main__":
    sys.exit(main("convert_onnx_to_onnxtxt"))
