"""The paper's experiments: streams of edits on real data, their measurements, and baselines to compare GRACE with."""
