"""``python -m quark_onnx.onnx.tools.replace_inf_weights``.

See the row of that name in ``table``.
"""

import sys

from quark_onnx.onnx.tools.table import main

if __name__ == "__main__":
    sys.exit(main("replace_inf_weights"))
