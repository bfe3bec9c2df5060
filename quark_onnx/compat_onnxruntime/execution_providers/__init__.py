"""Settings for single execution providers."""
