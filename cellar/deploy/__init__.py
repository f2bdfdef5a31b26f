"""Cellar on several hosts: Ray Serve places, keeps alive and scales; tokens go by Cellar's own wire (docs/hosts.md)."""
