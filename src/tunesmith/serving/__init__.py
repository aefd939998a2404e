"""Answers requests: the gateway (HTTP) and the embedded engine (torch)."""
