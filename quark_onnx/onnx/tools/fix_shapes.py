"""``python -m quark_onnx.onnx.tools.fix_shapes``; see the row of that name in ``table``."""

import sys

from quark_onnx.onnx.tools.table import main

if __name__ == "__main__":
    sys.exit(main("fix_shapes"))
