"""The version of the package, for its internal modules."""

__version__ = "0.1.0"
