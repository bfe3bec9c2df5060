"""Tools under AMD Quark's names: ``python -m quark_onnx.onnx.tools.NAME``.

``quark_onnx.onnx.tools.table`` says what each does; ``quark-onnx convert`` does the same under this
package's names.
"""
