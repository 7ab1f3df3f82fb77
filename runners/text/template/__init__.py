"""Chat templates, rendered in a sandbox that bounds what they can do."""
