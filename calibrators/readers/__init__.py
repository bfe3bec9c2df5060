"""Read calibration data."""
