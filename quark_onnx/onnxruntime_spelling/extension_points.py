"""Extension points of onnxruntime's quantizer that this package never calls.

A script that changes the registries of operators, or the methods of a quantizer, expects another
result: it gets an error that names the counterpart here.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location

from quark_onnx.onnxruntime_spelling.request import CallError

_REGISTRY = "onnxruntime.quantization.registry"
_TABLES = (
    "CommonOpsRegistry",
    "IntegerOpsRegistry",
    "QLinearOpsRegistry",
    "QDQRegistry",
)
#: How each extension is written here.
INSTEAD = (
    "register a rule for the operator (quark_onnx.rules.base.rule), name operators and nodes"
    " in the call (op_types_to_quantize, nodes_to_exclude), or set scales with the extra option"
    " TensorQuantOverrides"
)


def require_unchanged_registries() -> None:
    """Raise CallError if a script has changed onnxruntime's registries of operators."""
    registry = sys.modules.get(_REGISTRY)
    if registry is None:
        return
    # A second copy of the module has the registries as they are installed.
    spec = spec_from_file_location(f"{_REGISTRY}_installed", str(registry.__file__))
    assert spec is not None and spec.loader is not None
    installed = module_from_spec(spec)
    installed.__package__ = registry.__package__
    spec.loader.exec_module(installed)
    for table in _TABLES:
        present, expected = getattr(registry, table), getattr(installed, table)
        for op_type in [*present, *expected]:
            if present.get(op_type) is not expected.get(op_type):
                raise CallError(
                    f"{table}[{op_type!r}] was changed, and this package quantizes with rules"
                    f" of its own: {INSTEAD}"
                )
