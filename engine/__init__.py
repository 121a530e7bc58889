"""The token loop: token ids in, token events out."""
