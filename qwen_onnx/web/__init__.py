"""The chat page, and how it and one export are served to a browser on this machine."""
