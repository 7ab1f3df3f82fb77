"""`run --batch`: a file of prompts in, a file of results out."""
