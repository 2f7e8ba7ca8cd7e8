"""The exceptions of paredown: every one is a `ParedownError`, and says what, where, the numbers and what to do next."""


class ParedownError(Exception):
    """Anything that paredown itself refuses."""


class FormatError(ParedownError, ValueError):
    """A format or an element that is misspelled or cannot exist."""


class CodecError(ParedownError, ValueError):
    """A tensor that cannot be stored the way it was asked for."""
