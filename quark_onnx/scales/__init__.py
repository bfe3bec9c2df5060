"""Scales and zero points from ranges, and the constraints of targets on them."""
