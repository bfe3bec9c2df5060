"""AMD Quark's script ``quantize_quark.py``: arguments and recipes."""
