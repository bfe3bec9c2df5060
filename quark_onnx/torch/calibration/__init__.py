"""Calibration data, evaluation data, and statistics of activations."""
