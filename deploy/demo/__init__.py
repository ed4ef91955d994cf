"""The demo: its prompts and its story (`gracestream demo`)."""

from pathlib import Path

DEMO_FOLDER = Path(__file__).parent
"""The folder with the demo's prompts."""
