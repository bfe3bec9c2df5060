"""Mirror of AMD Quark's module ``quark.torch.export.config``."""
