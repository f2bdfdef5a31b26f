"""Servers of one machine under a load of conversations: replicas against one, KV tiers against none."""
