"""How the models that are known by name are built: from installed packages, as Hugging Face checkpoints."""
