"""Errors caused by the user or the environment, as opposed to a defect of the program."""


class UserError(Exception):
    """Base class of these errors. The text is one plain sentence: what was wrong, the value, and the remedy."""


class HistoryError(UserError):
    """A delta cannot be applied. The reader stops, because skipping a delta would let replicas diverge."""


class PlotError(UserError):
    """Plots cannot be drawn or written."""
