"""Checks that observe a training and warn or raise, without changing its numbers."""
