"""Drawings and tables of a run."""
