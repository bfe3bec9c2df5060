"""``python -m quark_onnx`` is ``quark-onnx``."""

import sys

from quark_onnx.cli import main

if __name__ == "__main__":  # a worker process imports this file too
    sys.exit(main())
