"""AMD Quark's script ``quantize_quark.py``: its arguments, and what its recipes do here."""
