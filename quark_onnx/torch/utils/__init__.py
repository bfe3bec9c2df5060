"""Mirror of AMD Quark's module ``quark.torch.utils``."""
