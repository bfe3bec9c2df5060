"""``python -m quark_onnx.onnx.tools.save_tensor_hist``; see the row of that name in ``table``."""

import sys

from quark_onnx.onnx.tools.table import main

if __name__ == "__main__":
    sys.exit(main("save_tensor_hist"))
