"""Errors that a user, not a defect, can bring about."""


class UserError(Exception):
    """The root of them. Its text is one plain sentence: what was wrong, with the value, and what to do."""


class HistoryError(UserError):
    """A delta cannot be applied. Skipping it would let replicas diverge, so the reader stops."""
