"""The root of every error that a user, not a defect, can bring about."""


class UserError(Exception):
    """Its text is one plain sentence: what was wrong, with the value, and what to do."""
