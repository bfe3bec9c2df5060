"""Run the float model as the reference."""
