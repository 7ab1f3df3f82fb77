"""How long a test waits for a process before it calls it hung: no test comes near it, however busy the machine is."""

PATIENCE = 900
"""Seconds."""
