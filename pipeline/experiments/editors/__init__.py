"""The editors that an experiment compares: GRACE, and the baselines of the paper."""
