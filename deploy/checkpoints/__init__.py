"""Building the models that are known by name, from installed packages, as Hugging Face checkpoints."""
