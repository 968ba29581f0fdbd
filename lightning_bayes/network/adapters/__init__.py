"""Adapters for inputs of other libraries and forms. Importing this package registers them (see `containers`)."""

from lightning_bayes.network.adapters import bags, graphs, hugging_face, sequences

__all__ = ["bags", "graphs", "hugging_face", "sequences"]
