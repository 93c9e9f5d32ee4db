"""The version, for whoever writes it down without importing the package."""

__version__ = "0.1.0"
