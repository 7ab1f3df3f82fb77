"""Ways of running the graphs of an export, one class each, behind one base."""
