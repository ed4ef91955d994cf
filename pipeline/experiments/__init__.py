"""The paper's experiments: streams of edits on real data, what is measured of them, and other editors beside GRACE."""
