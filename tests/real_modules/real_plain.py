"""Recurrent networks, an autoencoder and Lightning's own demos."""

from typing import Any

import torch
import torch.nn.functional as F
from helpers.tensors import seeded
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.demos.transformer import LightningTransformer
from real_data import BATCH, CLASSES, TOKENS, WORDS, labels, texts
from real_frame import HELD_OUT, Ordinary, Real
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Network


class Recurrent(Ordinary):
    def __init__(self, kind: Any, **words: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6, padding_idx=0)
        self.rnn = kind(6, 5, batch_first=True, **words)
        self.head = nn.Linear(5 * (1 + self.rnn.bidirectional), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(x))[0][:, -1])


def classified_texts(n: int, seed: int) -> Any:
    return DataLoader(TensorDataset(texts(n, seed), labels(n, seed)), BATCH)


class PackedRecurrent(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 5), nn.Linear(5, CLASSES)

    def forward(self, sequences: Any) -> Tensor:
        return self.head(self.rnn(sequences)[1][-1])


def packed(examples: list[Any]) -> Any:
    sequences, y = zip(*examples, strict=True)
    return pack_sequence(list(sequences), enforce_sorted=False), torch.stack(y)


def ragged(n: int, seed: int) -> list[Any]:
    sequences = [torch.randn(2 + number % 4, 4, generator=seeded(seed + number)) for number in range(n)]
    return list(zip(sequences, labels(n, seed), strict=True))


class BagOfWords(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.EmbeddingBag(WORDS, 6), nn.Linear(6, CLASSES)

    def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.embedding(text, offsets))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (text, offsets), y = batch
        return F.cross_entropy(self(text, offsets), y)


def bags(examples: list[Any]) -> Any:
    words, y = zip(*examples, strict=True)
    lengths = torch.tensor([len(text) for text in words])
    return (torch.cat(words), lengths.cumsum(0) - lengths), torch.stack(y)


def documents(n: int, seed: int) -> Any:
    texts_of = [torch.randint(WORDS, (3 + number % 5,), generator=seeded(seed + number)) for number in range(n)]
    return DataLoader(list(zip(texts_of, labels(n, seed), strict=True)), BATCH, collate_fn=bags)  # type: ignore[arg-type]


class AutoEncoder(Ordinary):
    """As on the first page of Lightning's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 8), nn.ReLU(), nn.Linear(8, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 28 * 28))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch.view(batch.size(0), -1)
        return F.mse_loss(self(x), x)


def pixels(n: int, seed: int) -> Any:
    return DataLoader(torch.rand(n, 28 * 28, generator=seeded(seed)), BATCH)  # type: ignore[arg-type]


class Boring(BoringModel):
    """Its targets are ones, which nothing but its loss says."""

    def split_batch(self, batch: Any) -> Any:
        return batch, torch.ones(len(batch), 2)


def boring_data(n: int, seed: int) -> Any:
    return DataLoader(torch.randn(n, 32, generator=seeded(seed)), BATCH)  # type: ignore[arg-type]


class Written(LightningTransformer):
    """Its output has a row for each word of each text, and so have the targets."""

    def prepare_data(self) -> None:
        """Nothing is downloaded."""

    def split_batch(self, batch: Any) -> Any:
        return tuple(batch), batch[1].reshape(-1)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.training_step(batch, batch_idx))

    validation_step = test_step


class WrittenInOrder(LightningLSTM):
    """With a `forward`, without which Lightning does not predict."""

    def prepare_data(self) -> None:
        """Nothing is downloaded."""

    def forward(self, words: Tensor, hidden: Any) -> Any:
        return self.model(words, hidden)

    def split_batch(self, batch: Any) -> Any:
        return (batch[0], self.model.init_hidden(len(batch[0]))), batch[1].reshape(-1)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.hidden = None
        self.log("test_loss", self.training_step(batch, batch_idx))

    validation_step = test_step


def next_words(n: int, seed: int) -> Any:
    return DataLoader(TensorDataset(texts(n, seed), texts(n, seed + 1)), BATCH)


OF_TEXT = (HELD_OUT, CLASSES)
REGRESSION: dict[str, Any] = {"likelihood": "regression"}
CASES = {
    "LSTM": Real(lambda: Recurrent(nn.LSTM), classified_texts, OF_TEXT, in_default=True),
    "GRU, two layers": Real(lambda: Recurrent(nn.GRU, num_layers=2), classified_texts, OF_TEXT),
    "LSTM, both directions": Real(lambda: Recurrent(nn.LSTM, bidirectional=True), classified_texts, OF_TEXT),
    "packed sequences": Real(
        PackedRecurrent,
        lambda n, seed: DataLoader(ragged(n, seed), BATCH, collate_fn=packed),  # type: ignore[arg-type]
        OF_TEXT,
        in_default=True,
    ),
    "EmbeddingBag with offsets": Real(BagOfWords, documents, OF_TEXT),
    "autoencoder": Real(AutoEncoder, pixels, (HELD_OUT, 28 * 28), {**REGRESSION, "structure": "diag"}),
    "Transformer of the demos": Real(
        lambda: Written(WORDS), next_words, (HELD_OUT * TOKENS, WORDS), {"subset": "last_layer"}
    ),
    "LSTM of the demos": Real(
        lambda: WrittenInOrder(WORDS),
        next_words,
        (HELD_OUT * TOKENS, WORDS),
        {"subset": "last_layer", "network": Network(output=0)},
    ),
    "BoringModel": Real(Boring, boring_data, (HELD_OUT, 2), {**REGRESSION, "structure": "kron"}, in_default=True),
}
