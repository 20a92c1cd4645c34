"""The one exception of the data modules."""


class DataError(ValueError):
    """Data, or a request for data, that cannot be served.

    The message is one line that names the file or the value and says what would be right.
    """
