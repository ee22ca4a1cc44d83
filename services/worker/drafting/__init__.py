"""Speculative decoding inside the worker: drafts are proposed, verified and never leave it."""
