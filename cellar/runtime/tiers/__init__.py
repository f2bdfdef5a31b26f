"""Tiers slower than the device, one file each, and what copies chunks between them."""
