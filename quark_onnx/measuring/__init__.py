"""Open data, run the float model on it, and measure ranges."""
