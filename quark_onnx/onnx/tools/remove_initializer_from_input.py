"""``python -m quark_onnx.onnx.tools.remove_initializer_from_input``.

See the row of that name in ``table``.
"""

import sys

from quark_onnx.onnx.tools.table import main

if __name__ == "__main__":
    sys.exit(main("remove_initializer_from_input"))
