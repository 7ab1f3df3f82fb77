"""What reaches a terminal, and what is asked there."""
