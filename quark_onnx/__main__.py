"""The command ``quark-onnx`` as ``python -m quark_onnx``."""

import sys

from quark_onnx.cli import main

if __name__ == "__main__":  # worker processes import this file, too
    sys.exit(main())
