"""Recurrent models under load: cellular batching beside padding, merging and the ideal (BatchMaker §2.7)."""
