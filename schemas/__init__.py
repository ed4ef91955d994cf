"""Messages, their JSON Schemas and golden records."""
