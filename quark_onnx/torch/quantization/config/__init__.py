"""Quantization configuration with AMD Quark's API names."""
