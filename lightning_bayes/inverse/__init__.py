"""Inverse problems: a linearised network as the prior of an image with linear measurements."""
