"""Errors, the registry, progress and wording, for all rooms."""
