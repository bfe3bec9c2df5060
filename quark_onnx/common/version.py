"""The version of the package, for internal modules."""

__version__ = "0.1.0"
