"""Algorithms that rotate the residual stream."""
