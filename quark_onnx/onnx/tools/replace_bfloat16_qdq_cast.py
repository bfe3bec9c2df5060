"""``python -m quark_onnx.onnx.tools.replace_bfloat16_qdq_cast``.

See the row of that name in ``table``.
"""

import sys

from quark_onnx.onnx.tools.table import main

if __name__ == "__main__":
    sys.exit(main("replace_bfloat16_qdq_cast"))
