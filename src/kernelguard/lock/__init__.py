"""Exactly which bytes, and put them there."""
