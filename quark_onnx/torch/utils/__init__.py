"""AMD Quark's module path ``quark.torch.utils``."""
