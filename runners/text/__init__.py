"""Text on both sides of the model: prompts to ids, ids to text, where an answer ends and what it means."""
