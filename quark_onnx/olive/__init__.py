"""Passes for Microsoft Olive: static, dynamic and weight-only quantization, and configurations of
QuarkQuantization.

Olive finds a pass by its package configuration. ``package_config`` returns Olive's own with these
passes added:

    olive.run("workflow.json", package_config=package_config())

``python -m quark_onnx.olive package.json`` writes it to a file, for
``olive run --package-config package.json``.
"""

from quark_onnx.olive.package import PASSES, package_config

__all__ = ["PASSES", "package_config"]
