"""``python -m quark_onnx.onnx.tools.save_tensor_hist``.

The table in ``quark_onnx.onnx.tools.table`` describes the tool.
"""

import sys

from quark_onnx.onnx.tools.table import main

if __name__ == "__main__":
    sys.exit(main("save_tensor_hist"))
