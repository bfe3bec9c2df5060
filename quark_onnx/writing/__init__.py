"""Write the quantized model: pairs, fused operators, provenance and files."""
