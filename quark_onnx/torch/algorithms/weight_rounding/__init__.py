"""Levels, losses and range searches that several rounding algorithms share."""
