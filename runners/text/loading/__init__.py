"""What stands in a tokenizer's files: verified before it is loaded, added to it, watched where it is unknown."""
