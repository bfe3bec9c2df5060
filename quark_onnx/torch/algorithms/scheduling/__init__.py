"""The order in which the layers of a block are quantized."""
