"""Ordinary Lightning modules and data that know nothing about posteriors."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

NOISE = 0.2  # standard deviation of a pixel around its reconstruction


class LitDigits(L.LightningModule):
    """A classifier."""

    def __init__(self, width: int = 64, lr: float = 3e-3, classes: int = 10) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.hparams["lr"])


class LitAutoencoder(L.LightningModule):
    """Its loss is the negative log-likelihood of an image, up to a constant."""

    def __init__(self, width: int = 32, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 2))
        self.decoder = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        return ((x - self(x)) / NOISE).square().sum() / (2 * len(x))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[0]), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", F.mse_loss(self(batch[0]), batch[0]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.hparams["lr"])


class DigitsData(L.LightningDataModule):
    """scikit-learn's digits, 8 × 8 pixels from 0 to 1 as rows: some to train on, 200 to validate, the rest to test."""

    def __init__(self, n_train: int = 300, batch_size: int = 32) -> None:
        super().__init__()
        self.n_train, self.batch_size = n_train, batch_size

    def setup(self, stage: str) -> None:
        x, y = map(torch.tensor, load_digits(return_X_y=True))
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        parts = order.tensor_split([self.n_train, self.n_train + 200])
        self.train, self.validation, self.test = (TensorDataset(x[part].float() / 16, y[part]) for part in parts)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, 100)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, 100)

    predict_dataloader = test_dataloader
