"""`SWAGCallback`: mean and variance of weights along training, in float64, and what a module has afterwards."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import Classifier, held_out, labelled, train_loader
from helpers.oracles import at_weights, jacobian
from helpers.tensors import real, seeded
from helpers.training import TASKS, EMAWeightAveraging, LitNet, loader, trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_bayes import BNN, DeepEnsemble, LaplaceCallback, OnlineLaplaceCallback, SWAGCallback
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.posterior.moments import WeightMoments

TIGHT = {"rtol": 1e-10, "atol": 1e-14}
DOUBLE: dict[str, Any] = {"precision": "64-true"}


class Kept(L.Callback):
    """The weights after each step and each epoch, by hand."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.epochs: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.steps.append(flat(pl_module))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(flat(pl_module))


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()


def check_moments(callback: SWAGCallback, path: list[Tensor]) -> None:
    weights = torch.stack(path)
    torch.testing.assert_close(callback.posterior.mean, weights.mean(0), **TIGHT)
    covariance, P = authors_covariance(path, callback.rank), callback.posterior.precision
    torch.testing.assert_close(P.inverse_diagonal(), covariance.diagonal(), rtol=1e-7, atol=1e-18)
    torch.testing.assert_close(P.solve(torch.eye(P.size).to(covariance)), covariance, rtol=1e-7, atol=1e-16)


def authors_covariance(path: list[Tensor], rank: int, scale: float = 1.0) -> Tensor:
    """Algorithm 1 of Maddox et al. (2019) step by step: moments are averages of θ and θ², and a deviation is taken from
    the mean after it was updated; the covariance is that of eq. (1), or without rank the diagonal of section 3.3."""
    mean, squares, D = torch.zeros_like(path[0]), torch.zeros_like(path[0]), []
    for n, θ in enumerate(path):
        mean = (n * mean + θ) / (n + 1)
        squares = (n * squares + θ.square()) / (n + 1)
        if len(D) == rank and rank:
            D.pop(0)
        D.append(θ - mean)
    diagonal = torch.diag((squares - mean.square()).clamp(min=1e-30))
    if not rank:
        return scale**2 * diagonal
    columns = torch.stack(D, 1)
    return scale**2 / 2 * (diagonal + columns @ columns.mT / (len(D) - 1))


WHEN: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "epochs": ({"start": 2}, {}, lambda kept: kept.epochs[2:]),
    "a share": ({"start": 0.5}, {}, lambda kept: kept.epochs[3:]),
    "every other epoch": ({"start": 1, "every_n_epochs": 2}, {}, lambda kept: kept.epochs[1::2]),
    "steps": ({"start": 1, "every_n_steps": 2}, {}, lambda kept: kept.steps[3::2]),
    "accumulated steps": (
        {"start": 0, "every_n_steps": 1},
        {"accumulate_grad_batches": 3},
        lambda kept: kept.steps[2::3],
    ),
    "a share of steps": (
        {"start": 0.5, "every_n_steps": 1},
        {"max_steps": 10, "max_epochs": -1},
        lambda kept: kept.steps[4:],
    ),
}


@pytest.mark.parametrize("rank", [0, 2, 20])  # diagonal, fewer than the snapshots, and more
@pytest.mark.parametrize("when", WHEN)
def test_moments_are_those_of_weights_kept_by_hand(when: str, rank: int, tmp_path: Path) -> None:
    words, options, expected = WHEN[when]
    kept, callback, module = Kept(), SWAGCallback(rank=rank, **words), LitNet()
    trainer(tmp_path, kept, callback, **{"max_epochs": 6, **DOUBLE, **options}).fit(module, loader())
    check_moments(callback, expected(kept))
    assert torch.equal(flat(module), callback.posterior.mean)
    assert not torch.equal(flat(module), kept.steps[-1])


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_posterior_is_that_of_the_authors_formulas(task: str, rank: int, tmp_path: Path) -> None:
    """Draws as the authors make them, the Gaussian over outputs, and the density, from snapshots kept by hand."""
    kept, module = Kept(), LitNet(task)
    callback = SWAGCallback(TASKS[task], rank=rank, scale=1.7, start=0, every_n_steps=1, network="net")
    trainer(tmp_path, kept, callback, max_epochs=3, **DOUBLE).fit(module, loader(task))
    posterior, path = callback.posterior, kept.steps
    Σ, P = authors_covariance(path, rank, 1.7), len(path[0])
    torch.testing.assert_close(posterior.precision.inverse_diagonal(), Σ.diagonal(), rtol=1e-6, atol=1e-18)
    J, x = jacobian(module.net, real(5, 3, seed=3)), real(5, 3, seed=3)
    torch.testing.assert_close(posterior.functional(x)[1], J @ Σ @ J.mT, rtol=1e-6, atol=1e-12)
    θ = posterior.mean + 1e-3 * real(P, seed=4)
    expected = torch.distributions.MultivariateNormal(posterior.mean, Σ).log_prob(θ)
    torch.testing.assert_close(posterior.log_prob(θ), expected, rtol=1e-6, atol=1e-6)

    generator = seeded(5)
    z = torch.randn(7, P, generator=generator, dtype=torch.float64)
    variance = torch.stack(path).var(0, correction=0)
    draws = 1.7 * variance.sqrt() * z
    if rank:
        steps = range(len(path) - rank, len(path))
        D = torch.stack([path[s] - torch.stack(path[: s + 1]).mean(0) for s in steps], 1)
        z2 = torch.randn(7, rank, generator=generator, dtype=torch.float64)
        draws = (draws + 1.7 * z2 @ D.mT / (rank - 1) ** 0.5) / 2**0.5
    torch.testing.assert_close(posterior.sample(7, seeded(5)) - posterior.mean, draws, rtol=1e-6, atol=1e-12)


def test_a_weight_that_is_unfrozen_has_no_deviations_before(tmp_path: Path) -> None:
    """Deviations of frozen weights would be as large as those of a whole pretrained network, and are zero."""
    kept, module, callback = Kept(), LitNet(), SWAGCallback(start=0, every_n_steps=1)

    class Unfreeze(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.net[0].weight.requires_grad_(trainer.current_epoch == 1)

    trainer(tmp_path, Unfreeze(), kept, callback, **DOUBLE).fit(module, loader())
    assert [len(part) for part in callback.state_dict()["moments"]["deviations"]] == [3, 3, 3, 4, 4, 4]
    check_moments(callback, kept.steps)


def test_a_deep_ensemble_of_them_is_multiswag(tmp_path: Path) -> None:
    callbacks = [SWAGCallback(start=0, every_n_steps=1) for _ in range(2)]
    for seed, callback in enumerate(callbacks):
        trainer(tmp_path, callback, **DOUBLE).fit(LitNet(seed=seed), loader())
    x, generator = real(5, 3, seed=3), seeded(2)
    found = DeepEnsemble([c.posterior for c in callbacks]).predict(x, BNN(samples=6), generator=seeded(2))
    drawn = [
        at_weights(c.posterior.network, c.posterior.sample(1, generator)[0], c.posterior.subset.names, x)
        for c in callbacks
        for _ in range(6)
    ]
    torch.testing.assert_close(found.probs, torch.stack(drawn).softmax(2).mean(0), rtol=1e-8, atol=1e-10)


def test_weights_far_from_zero_lose_no_digits() -> None:
    network, moments, path = nn.Linear(2, 2, dtype=torch.float64), WeightMoments(), []
    for step in range(5):
        with torch.no_grad():
            for p in network.parameters():
                p.copy_(1e6 + 1e-6 * step * torch.arange(p.numel()).reshape(p.shape))
        moments.add(network)
        path.append(flat(network))
    variance = torch.cat([s.flatten() for s in moments.squares.values()]) / 5
    torch.testing.assert_close(variance, torch.stack(path).var(0, correction=0), rtol=1e-3, atol=1e-16)


def test_frozen_weights_stay_out_and_weights_that_stand_still_are_almost_certain(tmp_path: Path) -> None:
    module, callback = LitNet(), SWAGCallback(start=0)
    module.net[0].weight.requires_grad_(False)
    module.net[0].bias.register_hook(torch.zeros_like)
    module.decay = 0.0
    before = flat(module.net[0])
    trainer(tmp_path, callback, **DOUBLE).fit(module, loader())
    posterior = callback.posterior
    assert posterior.subset.names == ("net.0.bias", "net.2.weight", "net.2.bias")
    assert torch.equal(flat(module.net[0]), before)
    assert posterior.precision.diagonal().isfinite().all()
    spread = posterior.sample(50) - posterior.mean
    assert spread[:, :4].abs().max() < 1e-12
    assert spread[:, 4:].abs().amax(0).min() > 1e-6
    assert posterior.log_prob(posterior.mean).isfinite()


# -- batch norm --------------------------------------------------------------------------------------------------------


def test_batch_norms_get_the_statistics_of_the_averaged_weights(tmp_path: Path) -> None:
    """Averages over batches of 8, 8, 8, 8 and 5, without dropout."""
    torch.manual_seed(0)
    module, callback = Classifier(), SWAGCallback(start=0)
    trainer(tmp_path, callback, max_epochs=3, **DOUBLE).fit(module, train_loader(37))
    x = labelled(37).tensors[0].double()
    z = module.net[0](x).detach()
    means = [part.mean(0) * len(part) / 37 for part in z.split(8)]
    variances = [part.var(0) * len(part) / 37 for part in z.split(8)]
    norm: Any = module.net[1]
    torch.testing.assert_close(norm.running_mean, torch.stack(means).sum(0), **TIGHT)
    torch.testing.assert_close(norm.running_var, torch.stack(variances).sum(0), **TIGHT)
    assert norm.momentum == 0.1
    callback.posterior.check_weights()


def test_a_rest_of_one_example_is_left_out_of_the_statistics(tmp_path: Path) -> None:
    module, callback = Classifier(), SWAGCallback(start=0)
    data = DataLoader(labelled(17), 8, drop_last=True)
    trainer(tmp_path, callback, **DOUBLE).fit(module, data)
    z = module.net[0](labelled(17).tensors[0][:16].double()).detach()
    torch.testing.assert_close(module.net[1].running_mean, z.mean(0), **TIGHT)


def test_data_without_an_end_are_passed_over_as_far_as_training_went(tmp_path: Path) -> None:
    data = labelled(16)

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            while True:
                yield from data

    module, callback = Classifier(), SWAGCallback(start=0)
    fit = trainer(tmp_path, callback, limit_train_batches=2, **DOUBLE)
    fit.fit(module, DataLoader(Endless(), 8))
    z = module.net[0](data.tensors[0].double()).detach()
    torch.testing.assert_close(module.net[1].running_mean, z.mean(0), **TIGHT)
    assert callback.posterior.n_data == 0


def test_an_exception_leaves_the_trained_weights(tmp_path: Path) -> None:
    class Breaks(Classifier):
        broken = False

        def split_batch(self, batch: Any) -> Any:
            if self.broken:
                raise OSError("the disk is gone")
            return batch

    class Break(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                pl_module.broken = True

    kept, module, callback = Kept(), Breaks(), SWAGCallback(start=0)
    buffers: list[Tensor] = []

    class Buffers(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            buffers[:] = [b.clone() for b in pl_module.buffers()]

    with pytest.raises(OSError, match="the disk is gone"):
        trainer(tmp_path, kept, Break(), Buffers(), callback, **DOUBLE).fit(module, train_loader())
    assert torch.equal(flat(module), kept.epochs[-1])
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), buffers, strict=True))
    with pytest.raises(RuntimeError, match="has no posterior yet"):
        _ = callback.posterior


# -- when there are too few snapshots ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ({}, {"max_epochs": 4}, "start=0.75 and every_n_epochs=1 use 1 of 4 epochs, but a variance needs 2"),
        ({"start": 9}, {"max_epochs": 4}, "use 0 of 4 epochs"),
        ({}, {"max_epochs": -1}, "but the Trainer does not know its length: give start= as an epoch"),
        ({"every_n_steps": 100}, {"max_epochs": 4}, "every_n_steps=100 is too large for a training of"),
    ],
)
def test_a_training_that_is_too_short_is_refused_before_it(
    words: Any, options: Any, message: str, tmp_path: Path
) -> None:
    module = LitNet()
    before = flat(module)
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, SWAGCallback(**words), **options, **DOUBLE).fit(module, loader())
    assert torch.equal(flat(module), before)


def test_a_training_that_stops_early_is_left_as_it_is(tmp_path: Path) -> None:
    kept, module, callback = Kept(), LitNet(), SWAGCallback(start=5)
    stop = EarlyStopping("val_loss", patience=0, min_delta=1e9)
    with pytest.warns(UserWarning, match="ended with 0 snapshots of the weights.*there is no posterior"):
        trainer(tmp_path, kept, stop, callback, max_epochs=20, **DOUBLE).fit(module, loader(), loader(seed=5))
    assert torch.equal(flat(module), kept.steps[-1])
    with pytest.raises(RuntimeError, match="ended with 0 snapshots"):
        _ = callback.posterior


def test_a_run_of_one_batch_works(tmp_path: Path) -> None:
    callback = SWAGCallback()
    trainer(tmp_path, callback, fast_dev_run=True, **DOUBLE).fit(LitNet(), loader())
    assert callback.posterior.precision.diagonal().isfinite().all()


def test_two_averages_on_one_trainer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the Trainer one SWAGCallback"):
        trainer(tmp_path, SWAGCallback(), SWAGCallback(name="b"), **DOUBLE).fit(LitNet(), loader())


def test_an_average_of_lightnings_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one average of the weights, and WeightAveraging makes another"):
        trainer(tmp_path, SWAGCallback(start=0), EMAWeightAveraging(), **DOUBLE).fit(LitNet(), loader())


def test_a_second_training_begins_anew_also_after_a_search_for_its_learning_rate(tmp_path: Path) -> None:
    """The finder saves a checkpoint before training, and restores it."""
    callback = SWAGCallback(start=0)
    trainer(tmp_path, callback, **DOUBLE).fit(LitNet(), loader())
    first, kept = callback.posterior.mean.clone(), Kept()

    class Searching(LitNet):
        lr = 0.1

    second = Searching()
    with torch.no_grad():
        second.net[0].weight.add_(1.0)
    finder = LearningRateFinder(num_training_steps=3, min_lr=1e-3, max_lr=1e-2)
    trainer(tmp_path, finder, kept, callback, **DOUBLE).fit(second, loader())
    assert not torch.equal(callback.posterior.mean, first)
    check_moments(callback, kept.epochs[-2:])


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_run_that_is_cut_off_goes_on_as_if_it_were_not(tmp_path: Path) -> None:
    """From a checkpoint in the middle, and from the last one, which holds averaged weights."""

    def run(epochs: int, path: str | None, folder: str) -> Any:
        torch.manual_seed(0)
        module, callback = Classifier().double(), SWAGCallback(start=1, calibrate=None, rank=2)
        module.net[3] = nn.Identity()  # no random numbers, which a new run would draw anew
        last = ModelCheckpoint(tmp_path / folder, save_last=True, monitor="val_loss", save_top_k=-1)
        fit = trainer(tmp_path, callback, last, max_epochs=epochs, enable_checkpointing=True, **DOUBLE)
        fit.fit(module, train_loader(shuffle=False), held_out(), ckpt_path=path)
        return module, callback, last

    module, whole, last = run(4, None, "whole")
    middle = next(str(path) for path in (tmp_path / "whole").glob("epoch=2*.ckpt"))
    _, _, half = run(3, None, "half")
    for path in (middle, half.last_model_path):
        other, resumed, _ = run(4, path, "rest")
        assert torch.equal(flat(other), flat(module))
        for name, part in whole.posterior.precision.parts().items():
            assert name == "shift" or torch.equal(getattr(resumed.posterior.precision, name), part)
        assert torch.equal(other.net[1].running_var, module.net[1].running_var)
    # Nothing is left to train: the posterior is that of the checkpoint, or made of its snapshots.
    other, again, _ = run(4, last.last_model_path, "again")
    assert torch.equal(flat(other), flat(module))
    assert torch.equal(again.posterior.mean, whole.posterior.mean)


def test_only_checkpoints_of_the_last_weights_get_the_average(tmp_path: Path) -> None:
    kept, module, callback = Kept(), LitNet(), SWAGCallback(start=1)
    files = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    fit = trainer(tmp_path, kept, callback, files, max_epochs=3, enable_checkpointing=True, **DOUBLE)
    fit.fit(module, loader())
    read = [torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=True) for epoch in range(3)]
    weights = [torch.cat([t.flatten() for t in checkpoint["state_dict"].values()]) for checkpoint in read]
    assert torch.equal(weights[1], kept.epochs[1])
    assert torch.equal(weights[2], callback.posterior.mean)
    trained = read[2]["callbacks"]["SWAGCallback[swag]"]["trained"]
    assert torch.equal(torch.cat([t.flatten() for t in trained.values()]), kept.epochs[2])
    with pytest.raises(PosteriorError, match="that of the averaged weights, which the module has when training ends"):
        fit.test(module, loader(), ckpt_path=str(tmp_path / "epoch=1.ckpt"), verbose=False)


# -- with others -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_other_posteriors_are_those_of_the_averaged_weights(first: bool, tmp_path: Path) -> None:
    swag, module = SWAGCallback(start=0), LitNet()
    others = [LaplaceCallback(tune=None, progress=False), OnlineLaplaceCallback("classification")]
    callbacks = [swag, *others] if first else [*others, swag]
    trainer(tmp_path, *callbacks, **DOUBLE).fit(module, loader())
    for callback in callbacks:
        callback.posterior.check_weights()
        assert torch.equal(callback.posterior.mean, swag.posterior.mean)
