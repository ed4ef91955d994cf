"""Choosing an editor's settings by trial edits on a user's requests (`gracestream calibrate --auto`)."""
