"""The configuration of a quantized model in AMD Quark's spelling, translated into this package's
own.
"""
