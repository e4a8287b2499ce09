"""Helpers without a domain: files, formatting, memory, serialization, statistics."""
