"""Computes logits: graphs opened as executors, over a KV cache that stays on the device."""
