"""AMD Quark for ONNX, with AMD's names.

Scripts written for ``quark.onnx`` change the name of the package alone. This package translates
their settings into its own configuration. ``quark_onnx.onnx.options`` lists the effect of each
option: supported, not needed, or refused with an alternative. ``quark_onnx.common.aliases`` lists
the names of this package, and the module paths of AMD Quark that have no file here.
"""

from importlib import import_module

from quark_onnx.common.aliases import ALIASES, imports_of, install

__all__ = []
for _home, _names in ALIASES[__name__].items():
    for _name in _names.split():
        globals()[_name] = getattr(import_module(_home), _name)
        __all__ += [_name]

install({path: imports_of(path) for path in ALIASES if path.startswith(f"{__name__}.")})
