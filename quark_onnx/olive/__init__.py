"""Passes for Microsoft Olive, with the parameters of Olive's own passes.

The passes are static, dynamic and weight-only quantization, and QuarkQuantization. Olive finds a
pass by its package configuration. ``package_config`` returns Olive's own with these passes added:

    olive.run("workflow.json", package_config=package_config())

``python -m quark_onnx.olive package.json`` writes the configuration to a file, for
``olive run --package-config package.json``.
"""

from quark_onnx.olive.package import PASSES, package_config

__all__ = ["PASSES", "package_config"]
