"""Embeddings, scores and reranking: answers that are made of hidden states."""
