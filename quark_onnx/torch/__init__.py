"""The PyTorch side: quantize modules and language models, and write checkpoints that runtimes load."""
