"""What this machine can run: versions, libraries, GPUs, and the providers that really start."""
