"""The demo: its prompts, and the story it tells."""
