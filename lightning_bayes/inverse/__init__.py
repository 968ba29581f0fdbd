"""Inverse problems: a linearised network as the prior of an image that is measured linearly."""
