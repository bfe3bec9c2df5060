"""Exports of quantized models to other runtimes."""
