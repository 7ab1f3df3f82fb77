"""Exports of models that were named: found, made once in the user's cache, listed and removed."""
