"""Structures that passes, rules and optimizers recognise in a graph."""
