"""Tools under AMD Quark's names: ``python -m quark_onnx.onnx.tools.NAME``.

``quark_onnx.onnx.tools.table`` describes the tools. ``quark-onnx convert`` has the same conversions
under this package's names.
"""
