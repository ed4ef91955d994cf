"""Task heads: sequence classification, and generation by causal models and encoder-decoders."""
