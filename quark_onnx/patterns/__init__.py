"""Recognise structures in a graph, for passes, rules and optimizers."""
