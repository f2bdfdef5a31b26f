"""The OpenAI HTTP API over one engine."""
