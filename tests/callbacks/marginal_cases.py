"""Modules whose training the marginal likelihood regularises, and the same with the prior in the loss, by hand."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from callback_cases import CLASSES, FEATURES, draw, trainer
from helpers.training import Lit
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Gaussian, Learning, MarginalLikelihoodCallback

EXAMPLES, BATCH, OUTPUTS, NOISE = 11, 4, 2, 0.4  # batches of 4, 4 and 3
TIGHT = {"rtol": 1e-9, "atol": 1e-12}
Loss = Callable[[Tensor, Tensor], Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.5)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.02)


class Net(Lit):
    """Two layers with biases and two or three outputs; `penalty` is a prior in the loss itself."""

    def __init__(self, loss: Loss = F.cross_entropy, outputs: int = CLASSES, optimizer: Any = adam) -> None:
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, outputs)), loss, optimizer)
        self.penalty = lambda module: 0.0
        with torch.no_grad():
            for number, p in enumerate(self.parameters()):
                p.copy_(0.5 * draw(*p.shape, seed=number))
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.penalty(self)

    def configure_optimizers(self) -> Any:
        return self.optimizer([p for p in self.parameters() if p.requires_grad])


def regressor(loss: Loss = F.mse_loss, optimizer: Any = adam) -> Net:
    return Net(loss, OUTPUTS, optimizer)


def classes(n: int = EXAMPLES, seed: int = 0) -> TensorDataset:
    x = draw(n, FEATURES, seed=seed).double()
    return TensorDataset(x, (x[:, :CLASSES] + draw(n, CLASSES, seed=seed + 100)).argmax(1))


def values(n: int = EXAMPLES, seed: int = 0) -> TensorDataset:
    x = draw(n, FEATURES, seed=seed).double()
    return TensorDataset(x, torch.sin(x[:, :OUTPUTS]) + NOISE * draw(n, OUTPUTS, seed=seed + 100))


def loader(of: Any = None, batch: int = BATCH) -> DataLoader[Any]:
    return DataLoader(classes() if of is None else of, batch)


def data_of(model: Net) -> DataLoader[Any]:
    return loader(values() if model.net[-1].out_features == OUTPUTS else None)


def marginal(model: Any = None, **words: Any) -> MarginalLikelihoodCallback:
    is_regression = model is not None and model.net[-1].out_features == OUTPUTS
    likelihood = words.pop("likelihood", Gaussian(NOISE) if is_regression else "classification")
    return MarginalLikelihoodCallback(likelihood, **{"progress": False, "calibrate": None, **words})


def fixed(model: Any = None, loss_scale: Any = None, n_data: Any = None, **words: Any) -> MarginalLikelihoodCallback:
    """A callback that never learns, so the prior stays as given."""
    learning = Learning(keep="last", loss_scale=loss_scale, n_data=n_data)
    return marginal(model, burn_in_epochs=1000, evidence=learning, **words)


def trained(folder: Path, model: Any, *callbacks: Any, path: Any = None, **options: Any) -> Any:
    """A copy of `model` after a fit in float64, and its Trainer."""
    model, data, val = copy.deepcopy(model), options.pop("data", None), options.pop("val", None)
    if any(getattr(callback, "burn_in_epochs", 0) > 3 for callback in callbacks):
        options = {"max_steps": 10_000, **options}  # it is not known, then, that no prior will be learned
    fit = trainer(folder, *callbacks, **{"precision": "64-true", "max_epochs": 3, **options})
    fit.fit(model, data_of(model) if data is None else data, val, ckpt_path=path)
    return model, fit


def penalised(model: Net, scale: float, priors: dict[str, float], n: int = EXAMPLES) -> Net:
    """A copy with `c/(2N) Σ_l δ_l ‖θ_l‖²` in its loss; the keys of `priors` are prefixes of parameter names."""
    model = copy.deepcopy(model)

    def penalty(module: nn.Module) -> Any:
        of = [(p, δ) for name, p in module.named_parameters() for start, δ in priors.items() if name.startswith(start)]
        return scale / (2 * n) * sum((δ * p.square().sum() for p, δ in of), start=torch.zeros(()))

    model.penalty = penalty  # type: ignore[assignment]
    return model


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, **TIGHT)
