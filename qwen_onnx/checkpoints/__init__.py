"""What a model is: its configuration and weights, found, read and verified."""
