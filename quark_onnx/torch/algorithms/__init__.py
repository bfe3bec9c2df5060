"""Algorithms that choose better codes than rounding to nearest, for blocks of PyTorch models."""
