"""Conformal sets of a callback's posterior, and what its Trainer has used before."""

import warnings
from functools import partial
from typing import Any

import torch
from helpers.training import Lit, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import LaplaceCallback, Prediction


def test_sets_of_a_trainers_predictions_on_fresh_data(tmp_path: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(900, 4, generator=generator)
    y = (2 * x[:, :3] + torch.randn(900, 3, generator=generator)).argmax(1)
    train, validation, fresh, new = (
        DataLoader(TensorDataset(x[part], y[part]), 50) for part in torch.arange(900).tensor_split([200, 400, 700])
    )
    laplace, module = LaplaceCallback(progress=False), Lit(nn.Linear(4, 3), optimizer=partial(torch.optim.Adam, lr=0.1))
    fit = trainer(tmp_path, laplace, max_epochs=3)
    fit.fit(module, train, validation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conformal = laplace.posterior.conformalize(fresh, 0.9)
    inputs = DataLoader(TensorDataset(new.dataset.tensors[0]), 50)  # type: ignore[attr-defined]
    sets = conformal.sets(Prediction.cat(fit.predict(module, inputs)))
    y_new = new.dataset.tensors[1]  # type: ignore[attr-defined]
    assert float(sets.gather(1, y_new[:, None]).double().mean()) > 0.85
    assert sets.shape == (200, 3)
