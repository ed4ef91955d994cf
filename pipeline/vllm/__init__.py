"""Corrections in vLLM."""
