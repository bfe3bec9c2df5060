"""``python -m quark_onnx.onnx.tools.print_a16w8_a8w8_nodes``.

The table in ``quark_onnx.onnx.tools.table`` describes the tool.
"""

import sys

from quark_onnx.onnx.tools.table import main

if __name__ == "__main__":
    sys.exit(main("print_a16w8_a8w8_nodes"))
