"""Judging a generator, and the page that shows it."""
