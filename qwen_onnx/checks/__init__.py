"""What an export is, whether it is what it should be, and how fast."""
