"""Lazy: Universal Transformers that update only what still changes (ACL 2022, long 208)."""
