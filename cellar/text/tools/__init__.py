"""Tool calls in text: how each family of models writes them, and what a request asks for."""
