"""The ways through a model: in memory, from file to file, and with an evaluation."""
