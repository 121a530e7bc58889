"""Checkpoints, tokenizers, dialects and the transformer they feed."""
