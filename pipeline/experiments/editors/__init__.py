"""The editors that are compared: GRACE, and those beside which the paper measures it."""
