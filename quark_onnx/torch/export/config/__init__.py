"""A mirror of AMD Quark's module ``quark.torch.export.config``."""
