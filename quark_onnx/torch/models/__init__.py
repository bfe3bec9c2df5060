"""The structure of models, and the layers that quantized models are made of."""
