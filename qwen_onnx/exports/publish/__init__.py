"""An export appears whole or not at all: staged beside its destination, then renamed."""
