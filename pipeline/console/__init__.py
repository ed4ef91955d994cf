"""The console: pages in which people see answers, correct them, and follow and undo corrections.

1. Nothing bypasses the log: an action writes a record of feedback, and pages show only what the topics hold.
2. Every view has an address that can be shared.
3. Pages load nothing from other hosts, and run no script that is not in `static`.

`static` holds htmx 2.0.11 and its extension for server-sent events 2.2.4, unchanged (licence 0BSD).
"""
