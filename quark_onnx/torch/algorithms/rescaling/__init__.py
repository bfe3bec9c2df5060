"""Algorithms that move scales between activations and weights."""
