"""How ranges are found, by AMD Quark's names."""
