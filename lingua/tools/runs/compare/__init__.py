"""Whether a difference between runs is more than chance (`python -m lingua compare`)."""
