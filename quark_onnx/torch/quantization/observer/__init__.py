"""Calibration methods by AMD Quark's names."""
