"""Text: tokenizer, chat templates, incremental detokenizer, stop strings. No torch, no clock."""
