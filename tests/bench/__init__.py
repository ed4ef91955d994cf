"""Measurements of the product as it is: `python -m tests.bench NAME`."""
