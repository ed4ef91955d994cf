"""Finding the settings of an editor by trial edits on a user's requests (`gracestream calibrate --auto`)."""
