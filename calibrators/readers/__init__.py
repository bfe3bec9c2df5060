"""Readers of calibration data."""
