"""Calibration and evaluation data, and the statistics taken from activations."""
