"""Message types, the JSON Schemas and AsyncAPI document generated from them, and golden records."""
