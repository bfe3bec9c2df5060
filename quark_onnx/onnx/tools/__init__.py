"""Tools under AMD Quark's names: ``python -m quark_onnx.onnx.tools.NAME``.

The tools have no files: ``quark_onnx.onnx.tools.table`` describes them. ``quark-onnx convert`` has
the same conversions under this package's names.
"""

from quark_onnx.common.aliases import install
from quark_onnx.onnx.tools.table import TOOLS

_SOURCE = """
import sys
from quark_onnx.onnx.tools.table import main
if __name__ == "__main__":
    sys.exit(main({name!r}))
"""

install({f"{__name__}.{name}": _SOURCE.format(name=name) for name in TOOLS})
