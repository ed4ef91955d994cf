"""The processes: inference replicas, the editor, and the command line that starts them."""
