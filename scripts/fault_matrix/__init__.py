"""Faults at every place of a transfer, and what has to become of it. See docs/faults.md."""
