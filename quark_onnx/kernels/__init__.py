"""Numpy arithmetic of number formats and learned rounding; exact references for other code."""
