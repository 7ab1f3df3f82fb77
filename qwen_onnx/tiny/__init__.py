"""The bundled model, a checkpoint of 2.8 M parameters: no code."""
