"""From logits to a token: what is asked of it, and how it is chosen."""
