"""Modules, data and Trainers of every kind, and what comes after the fit."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from callback_cases import Classifier, Regressor, draw, held_out, labelled, laplace, measured, train_loader, trainer
from helpers.training import Lit
from lightning.pytorch.tuner import Tuner
from online_cases import EXAMPLES, Autoencoder, ByHand, Given, agree, flat, online, same, still, trained, vectors
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from lightning_bayes import BNN, LaplacePosterior, Memory, OnlineLaplaceCallback

X = draw(5, 4, seed=9).double()


# -- modules -----------------------------------------------------------------------------------------------------------


class Wrapped(L.LightningModule):
    """A network among other trainable parts, with `split_batch`."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((4,), 0.125))
        inner = Autoencoder()
        self.net = nn.Sequential(inner.encoder, inner.decoder)

    def split_batch(self, batch: Any) -> Any:
        return batch["image"], batch["image"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch["image"]) + self.shift, batch["image"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


@pytest.mark.filterwarnings(
    "ignore:online_laplace. the loss of the training step"
)  # for the shift is not in the network
@pytest.mark.parametrize("samples", [1, 2])
def test_a_networks_weights_are_sampled_and_all_others_train(tmp_path: Path, samples: int) -> None:
    callback = online(n_data=EXAMPLES, network="net", train_samples=samples)
    run = trained(tmp_path, Wrapped(), [{"image": x} for x in vectors()], callback)

    class Inner(Autoencoder):
        """The same with the shift as a parameter without curvature, which is not sampled."""

        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.full((4,), 0.125))

        def loss(self, batch: Tensor) -> Tensor:
            return F.mse_loss(self(batch) + self.shift, batch)

    size = flat(Autoencoder()).numel()
    padded = [torch.cat([noise.new_zeros(4), noise]) for noise in run.noises]
    expected = ByHand(Inner(), EXAMPLES, samples=samples)
    names = [name for name, _ in expected.model.named_parameters()]
    assert names[0] == "shift"
    expected.run(vectors(), padded)
    same(run.C, expected.C[-size:])
    same(run.weights, flat(expected.model))
    assert run.callback.posterior.subset.names == tuple(name for name, _ in run.model.net.named_parameters())


@pytest.mark.parametrize("kind", ["frozen", "names", "last_layer"])
def test_weights_outside_of_the_subset_are_not_sampled(tmp_path: Path, kind: str) -> None:
    """Frozen ones do not move at all; others train at their mean."""
    chosen = {
        "frozen": ["encoder.0", "decoder.0.weight", "decoder.0.bias", "decoder.2.weight", "decoder.2.bias"],
        "names": ["encoder.0", "decoder.2.bias"],
        "last_layer": ["decoder.2.weight", "decoder.2.bias"],
    }[kind]
    model = Autoencoder()
    if kind == "frozen":
        model.encoder[2].requires_grad_(False)
    subset: Any = {"frozen": "all", "names": chosen, "last_layer": "last_layer"}[kind]
    run = trained(tmp_path, model, vectors(), online(n_data=EXAMPLES, subset=subset))
    names = [
        name for name, _ in model.named_parameters() if any(f"{name}.".startswith(f"{prefix}.") for prefix in chosen)
    ]
    assert run.callback.posterior.subset.names == tuple(names)

    class Some(ByHand):
        """Noise for some weights, and gradients for those that train."""

        def gradient(self, θ: Tensor, batch: Any) -> Tensor:
            found = super().gradient(θ, batch)
            return found * self.trains

    parts = {name: p.numel() for name, p in model.named_parameters()}
    where = torch.cat([torch.full((n,), name in names) for name, n in parts.items()])
    expected = Some(Autoencoder(), EXAMPLES)
    expected.trains = torch.cat([torch.full((p.numel(),), float(p.requires_grad)) for p in model.parameters()])  # type: ignore[attr-defined]
    spread = []
    for noise in run.noises:
        spread.append(torch.zeros(len(where), dtype=torch.float64).masked_scatter(where, noise))
    expected.run(vectors(), spread)
    same(run.C, expected.C[where])
    same(run.weights, flat(expected.model))
    if kind == "frozen":
        same(run.model.encoder[2].weight, model.encoder[2].weight.double())


def one_logit() -> Lit:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0))
    loss = lambda f, y: F.binary_cross_entropy_with_logits(f, y.to(f))  # noqa: E731
    return Lit(net, loss, partial(torch.optim.Adam, lr=0.01))


def binary(n: int, seed: int = 0) -> TensorDataset:
    x, y = labelled(n, seed).tensors
    return TensorDataset(x, (y > 0).long())


@pytest.mark.parametrize(
    ("likelihood", "kind", "data", "metric"),
    [
        ("classification", Classifier, labelled, "acc"),
        ("regression", Regressor, measured, "rmse"),
        ("binary", one_logit, binary, "acc"),
    ],
)
def test_any_likelihood_trains_tests_and_predicts(
    tmp_path: Path, likelihood: str, kind: Any, data: Any, metric: str
) -> None:
    """The posterior is scored beside MAP."""
    L.seed_everything(0, verbose=False)
    model, callback = kind(), online(likelihood=likelihood, hessian="auto")
    fit = trainer(tmp_path, callback)
    fit.fit(model, DataLoader(data(37), 8, shuffle=True))
    loader = DataLoader(data(11, 5), 4)
    (logged,) = fit.test(model, loader, verbose=False)
    for who in ("map", "online_laplace"):
        assert {f"test_nll_{who}", f"test_{metric}_{who}"} <= logged.keys()
    assert logged["test_nll_map"] != logged["test_nll_online_laplace"]
    posterior = callback.posterior
    x = data(11, 5).tensors[0]
    found = fit.predict(model, loader)
    expected = posterior.predict(x, BNN(samples=5), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(torch.cat([each.epistemic for each in found]), expected.epistemic)
    assert posterior.n_data == 37
    assert isinstance(posterior, LaplacePosterior)
    assert posterior.precision.diagonal().min() > 3.0


def test_the_evidence_can_be_had_by_one_pass_over_the_data(tmp_path: Path) -> None:
    """Training does not use it."""
    run = trained(tmp_path, Autoencoder(), vectors())
    posterior: Any = run.callback.posterior
    with pytest.raises(RuntimeError, match="has no log-likelihood: use with_log_likelihood"):
        posterior.log_marginal_likelihood()
    known = posterior.with_log_likelihood([(x, x) for x in vectors()])
    x = torch.cat(vectors())
    fit = torch.distributions.Normal(run.model(x).detach(), 1.0).log_prob(x).sum()
    θ, P = run.weights, run.C + 3.0
    expected = fit - 0.5 * (P.log().sum() - len(θ) * torch.tensor(3.0).double().log() + 3.0 * θ @ θ)
    same(known.log_marginal_likelihood(), expected)
    assert known.tune_prior("marglik").prior_precision > 0


def test_two_kinds_of_posterior_from_one_training(tmp_path: Path) -> None:
    callback, other = online(n_data=37, likelihood="classification"), laplace(structure="diag", tune=None)
    model = Classifier()
    fit = trainer(tmp_path, other, callback, precision="64-true")
    fit.fit(model, train_loader())
    (logged,) = fit.test(model, held_out(), verbose=False)
    assert {"test_nll_map", "test_nll_laplace", "test_nll_online_laplace"} <= logged.keys()
    predictions = fit.predict(model, held_out())
    assert predictions[0].keys() == {"laplace", "online_laplace"}
    same(other.posterior.mean, callback.posterior.mean)  # both around the mean


# -- data --------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.cat(vectors()))


def counted(folder: Path, loader: Any, callback: OnlineLaplaceCallback | None = None, **options: Any) -> Any:
    """`N` and the curvature of an epoch, at weights that do not move."""
    callback = callback or online(memory_factor=0.0)
    run = trained(folder, Autoencoder(still), loader, callback, **{"max_epochs": 1, **options})
    return run.callback.posterior.n_data, run.C


def test_iterable_data_need_their_number(tmp_path: Path) -> None:
    loader = DataLoader(Stream(), 4)
    n, C = counted(tmp_path, loader, online(memory_factor=0.0, n_data=33))
    assert n == 33
    once = ByHand(Autoencoder(), 1)
    parts = [33 / len(x) * once.curvature(flat(Autoencoder()), x) for x in vectors()]
    same(C, sum(parts))
    with pytest.raises(ValueError, match="pass n_data="):
        counted(tmp_path, loader)


def test_without_the_number_of_the_data_where_it_is_not_needed(tmp_path: Path) -> None:
    n, C = counted(tmp_path, DataLoader(Stream(), 4), online(memory_factor=0.0, memory=Memory(extrapolate=False)))
    assert n == 0
    same(C, ByHand(Autoencoder(), 1).curvature(flat(Autoencoder()), torch.cat(vectors())))


def test_a_subset_of_the_data_is_counted(tmp_path: Path) -> None:
    data = torch.cat(vectors())
    loader: Any = DataLoader(data, 4, sampler=SubsetRandomSampler(range(7)))  # type: ignore[arg-type]
    assert counted(tmp_path, loader)[0] == 7
    assert counted(tmp_path, loader, online(n_data=5))[0] == 5


@pytest.mark.parametrize(("shuffle", "limit", "n"), [(False, 2, 8), (True, 2, 11), (False, 0.5, 4), (False, 1.0, 11)])
def test_limited_batches(tmp_path: Path, shuffle: bool, limit: Any, n: int) -> None:
    """In order, training sees only the first batches; a limit on shuffled data excludes none."""
    loader: Any = DataLoader(torch.cat(vectors()), 4, shuffle=shuffle)  # type: ignore[arg-type]
    assert counted(tmp_path, loader, limit_train_batches=limit)[0] == n


def test_several_loaders_need_a_number(tmp_path: Path) -> None:
    class Two(Autoencoder):
        def split_batch(self, batch: Any) -> Any:
            return batch["a"], batch["a"]

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch["a"])

    loaders = {"a": DataLoader(torch.cat(vectors()), 4), "b": DataLoader(torch.cat(vectors()), 4)}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"2 training dataloaders.*: pass n_data="):
        trained(tmp_path, Two(), loaders, online())
    run = trained(tmp_path, Two(), loaders, online(n_data=EXAMPLES))
    agree(run, ByHand(Autoencoder(), EXAMPLES).run(vectors(), run.noises))


# -- Trainers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("val", [None, vectors()])
def test_a_fast_run_fits_and_writes_nothing(tmp_path: Path, val: Any) -> None:
    loader: Any = DataLoader(torch.cat(vectors()), 4)  # type: ignore[arg-type]
    run = trained(tmp_path, Autoencoder(), loader, online(), fast_dev_run=True, val=val)
    agree(run, ByHand(Autoencoder(), EXAMPLES).run(vectors()[:1], run.noises, epochs=1))
    assert not list(tmp_path.rglob("*.pt"))


def test_nothing_to_train_leaves_no_posterior(tmp_path: Path) -> None:
    class Nothing(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    for loader, options in ((Given(vectors()), {"max_epochs": 0}), (DataLoader(Nothing(), None), {"max_epochs": 1})):
        callback, model = online(n_data=EXAMPLES), Autoencoder()
        trainer(tmp_path, callback, **options).fit(model, loader)
        with pytest.raises(RuntimeError, match="OnlineLaplaceCallback 'online_laplace' has no posterior yet"):
            callback.posterior  # noqa: B018
        with pytest.raises(RuntimeError, match="has no posterior yet"):
            callback.fit_now(None, model)
        assert "training_step" not in model.__dict__


def test_one_trainer_for_two_fits_begins_anew_from_the_weights_of_the_first(tmp_path: Path) -> None:
    callback, model = online(n_data=EXAMPLES), Autoencoder()
    fit = trainer(tmp_path, callback, precision="64-true", max_epochs=1)
    fit.fit(model, Given(vectors()))
    between = flat(model)
    fit.fit_loop.max_epochs = 2
    fit.fit(model, Given(vectors()))
    start = Autoencoder().double()
    nn.utils.vector_to_parameters(between, start.parameters())
    expected = trained(tmp_path, start, vectors(), max_epochs=1)
    assert torch.equal(flat(model), expected.weights)
    same(callback.state_dict()["memory"]["C"], expected.C)


def test_the_posterior_of_the_moment_may_be_asked_for_in_training(tmp_path: Path) -> None:
    """By an earlier callback, after the optimizer's step."""
    found: list[Any] = []

    class Ask(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            posterior = callback.fit_now(trainer, pl_module)
            found.append((posterior.mean.clone(), posterior.precision.diagonal().clone()))

    callback = online(n_data=EXAMPLES)
    fit = trainer(tmp_path, Ask(), callback, precision="64-true")
    fit.fit(Autoencoder(), Given(vectors()))
    run = trained(tmp_path, Autoencoder(), vectors())
    for steps, (mean, precision) in enumerate(found, start=1):
        part = trained(tmp_path, Autoencoder(), vectors(), online(n_data=EXAMPLES), max_steps=steps)
        same(mean, part.weights)
        same(precision, part.C + 3.0)
    same(found[-1][0], run.weights)


def test_a_learning_rate_finder_comes_before_and_leaves_no_trace(tmp_path: Path) -> None:
    class Rated(Autoencoder):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 0.05

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.lr)

    model, callback = Rated(), online(n_data=EXAMPLES)
    fit = trainer(tmp_path, callback, precision="64-true", logger=False)
    Tuner(fit).lr_find(model, Given(vectors()), num_training=4, update_attr=False)
    fit.fit(model, Given(vectors()))
    run = trained(tmp_path, Autoencoder(), vectors())
    same(flat(model), run.weights)
    same(callback.state_dict()["memory"]["C"], run.C)
