"""Files that a deployment folder gets as they are: they need onnxruntime and numpy, and nothing of
this package.
"""
