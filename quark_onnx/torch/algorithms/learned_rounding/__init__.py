"""Algorithms that train the rounding of weights."""
