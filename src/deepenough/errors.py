"""The one exception meant for people.

Code raises `UserError` when the user can put the matter right: a missing file, an impossible value,
a folder in the way. Its message is one sentence that says what was wrong and what to do. The
command line prints it without a traceback and exits with code 2; any other exception is a bug.
"""


class UserError(Exception):
    """Something the user can put right, said in one sentence."""


class LostProcessError(UserError):
    """Another process has ended amid common work: the same command goes on with it."""
