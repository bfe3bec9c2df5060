"""``python -m quark_onnx.onnx.tools.remove_qdq_between_ops``.

See the row of that name in ``table``.
"""

import sys

from quark_onnx.onnx.tools.table import main

if __name__ == "__main__":
    sys.exit(main("remove_qdq_between_ops"))
