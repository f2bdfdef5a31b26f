"""OpenAI's Responses and Conversations: the same answers as /v1/chat/completions, with a memory."""
