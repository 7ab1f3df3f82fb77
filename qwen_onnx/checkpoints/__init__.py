"""What a model is: its configuration and weights, found, read and verified."""

from __future__ import annotations

DEFAULT_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
BUNDLED_MODEL = "tiny"
TEMPLATES_FOLDER = "additional_chat_templates"
"""Where transformers keeps chat templates under names, as NAME.jinja."""
