"""The version of this node, read from the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("viiwork")
except PackageNotFoundError:  # run from a source tree that was never installed
    VERSION = "0.0.0+source"
