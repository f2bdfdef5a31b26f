"""/v1/messages: Anthropic's API over the same prompts, tools and engine as OpenAI's."""
