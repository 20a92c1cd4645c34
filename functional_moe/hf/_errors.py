"""The one error of this package."""


class HFError(ValueError):
    """A model directory that cannot be read or written as what it says it is; the message is one line."""
