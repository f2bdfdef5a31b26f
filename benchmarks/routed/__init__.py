"""Affinity against round robin and least-loaded with real engines: processes that compute, report and are routed to."""
