"""Commands that pin: lock, sync."""
