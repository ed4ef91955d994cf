"""What a model is for: classes of a text, or a generated text; as a causal model or an encoder-decoder."""
