"""The version of the package, for what is below its front door."""

__version__ = "0.1.0"
