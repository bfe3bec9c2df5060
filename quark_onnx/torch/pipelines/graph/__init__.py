"""Quantization of arbitrary modules through their traced graph."""
