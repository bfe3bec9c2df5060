"""GPTQ and its successors GPTAQ and Qronos."""
