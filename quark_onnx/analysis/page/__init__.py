"""Drawings of an analysis."""
