"""Reasoning in text: how each family of models marks it, and reading it while it is written."""
