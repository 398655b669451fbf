"""Types, settings, randomness and draft trees: what every other package speaks, and nothing that computes."""
