"""The reproduction of a history: its decisions, made again with the model and compared with the record."""

from gracestream.pipeline.reproduction.reproduce import ReproductionRun

__all__ = ["ReproductionRun"]
