"""Engines: how a replica runs the model over requests that come at any time."""
