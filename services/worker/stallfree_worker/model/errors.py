"""What stops a worker's start: a model that cannot be loaded or does not fit. Clients never see it."""

from __future__ import annotations


class ModelLoadError(Exception):
    """The model cannot be served as asked. The message names the file, key or setting, and the value that is wrong."""
