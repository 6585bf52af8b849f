"""Errors that are a message to the user, not a bug: the command line prints them without a traceback."""

from typing import ClassVar


class UserError(Exception):
    """What is wrong, where, and what to do about it, in one or two lines."""

    exit_code: ClassVar[int] = 1


class DataError(UserError):
    """A data set is missing, damaged, or does not fit what was asked of it."""


class ConfigError(UserError):
    """A setting is unknown or has the wrong type or value."""


class MismatchError(UserError):
    """Stored tensors (a mask, a delta, a checkpoint) do not fit the model they are loaded into."""


class NonFiniteError(UserError):
    """A loss or gradient became infinite or not-a-number."""

    exit_code = 3


class Stopped(UserError):
    """A signal stopped the run after its current step; it was saved and can be resumed."""

    exit_code = 75  # EX_TEMPFAIL: try again later
