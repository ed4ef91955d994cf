"""The editing engine and the log that it lives on; no process of its own."""
