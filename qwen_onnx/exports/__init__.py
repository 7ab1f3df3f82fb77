"""Turns a checkpoint into an exported folder: converts and quantizes weights, writes graphs and manifest."""
