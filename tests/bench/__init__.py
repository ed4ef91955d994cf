"""Benchmarks of the product: `python -m tests.bench NAME`."""
