"""AMD Quark's script ``quantize_quark.py``: its arguments, and what each of its recipes does here."""
