"""The demo: its prompts, and the story it tells."""

from pathlib import Path

DEMO_FOLDER = Path(__file__).parent
