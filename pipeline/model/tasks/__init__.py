"""The tasks of models: sequence classification, and generation by causal models and encoder-decoders."""
