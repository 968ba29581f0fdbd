"""MC dropout: masks against weights with dropped rows, what a batch changes, and networks without a mask."""

from typing import Any

import pytest
import torch
from helpers.networks import made
from helpers.tensors import TIGHT, real, seeded
from helpers.untouched import untouched
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import (
    Augmented,
    Bernoulli,
    Categorical,
    Dropout,
    Gaussian,
    MCDropout,
    evaluate,
    fit_laplace,
    mc_dropout,
)
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.predictive import dropout, predict

X = real(6, 3, seed=1)
LABELS = torch.tensor([0, 2, 1, 1, 0, 2])


def net(p: float = 0.4) -> nn.Sequential:
    """With a batch norm, whose statistics must stay those of training."""
    return made(
        lambda: nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, 7), nn.Tanh(), nn.Dropout(p / 2),
            nn.Linear(7, 3),
        )
    ).eval()  # fmt: skip


def masks_of(network: nn.Sequential, seed: int) -> list[Tensor]:
    """What each dropout layer multiplies by in one draw, read off its hooks with inputs of one."""
    masks, layers = dropout.Masks(), list(dropout.dropout_layers(network).values())
    masks.draw(seed)
    widths = [m.out_features for m in network if isinstance(m, nn.Linear)]
    ones = [torch.ones(1, widths[number]).double() for number in range(len(layers))]
    return [masks.hook(n)(layer, (), one)[0] for n, (layer, one) in enumerate(zip(layers, ones, strict=True))]


def by_weights(network: nn.Sequential, x: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Each draw as a network without dropout: the next layer's weights times the mask.  # [n, B, C]"""
    outputs = []
    for seed in torch.randint(2**62, (n,), generator=generator).tolist():
        first, second = masks_of(network, seed)
        h = network[2](network[1](network[0](x)))
        h = network[5](h @ (network[4].weight * first).mT + network[4].bias)
        outputs.append(h @ (network[7].weight * second).mT + network[7].bias)
    return torch.stack(outputs).detach()


LIKELIHOODS = {"classification": Categorical(), "binary": Bernoulli(), "regression": Gaussian(0.3)}


@pytest.mark.parametrize("kept", [predict.KEPT, 0])  # draws in memory, and drawn again when they are needed
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_a_prediction_is_the_mixture_of_networks_with_dropped_weights(
    kind: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "KEPT", kept)
    network, likelihood = net(), LIKELIHOODS[kind]
    moments = [likelihood.conditional(f) for f in by_weights(network, X, 9, seeded(2))]
    means = torch.stack([mean for mean, _ in moments])
    with untouched(network):
        found = mc_dropout(network, likelihood, samples=9).predict(X, generator=seeded(2))
    torch.testing.assert_close(found.mean if kind == "regression" else found.probs, means.mean(0), **TIGHT)
    torch.testing.assert_close(found.epistemic, means.var(0, correction=0), **TIGHT)
    aleatoric = torch.stack([variance.expand_as(means[0]) for _, variance in moments]).mean(0)
    torch.testing.assert_close(found.aleatoric, aleatoric, **TIGHT)


def test_masks_are_bernoulli_and_differ_between_layers_calls_and_draws() -> None:
    n, p = 200_000, 0.3
    masks, layer, ones = dropout.Masks(), nn.Dropout(p), torch.ones(1, n).double()
    draws = []
    for seed, number in ((0, 0), (0, 1), (1, 0)):
        masks.draw(seed)
        draws += [masks.hook(number)(layer, (), ones)[0] for _ in range(2)]
    for draw in draws:
        assert ((draw == 0) | ((draw - 1 / 0.7).abs() < 1e-12)).all()
        assert abs(float((draw == 0).double().mean()) - p) < 5 * (p * (1 - p) / n) ** 0.5
    correlation = torch.stack(draws).corrcoef() - torch.eye(len(draws))
    assert correlation.abs().max() < 5 / n**0.5


@pytest.mark.parametrize(
    "layer",
    [kind(0.3) for kind in dropout.KINDS] + [nn.Dropout(1.0), nn.AlphaDropout(1.0)],
    ids=repr,
)
def test_each_layer_has_the_moments_and_the_channels_of_torchs_own(layer: Any) -> None:
    """One mask for all examples; over many draws, the mean and variance of torch's own layer in training mode."""
    shape = {nn.Dropout1d: (2, 3, 5), nn.Dropout3d: (2, 3, 2, 2, 2)}.get(type(layer), (2, 3, 4, 5))
    x, n = real(*shape, seed=3), 4000
    masks = dropout.Masks()
    hook, draws = masks.hook(0), []
    for seed in range(n):
        masks.draw(seed)
        draws.append(hook(layer, (), x))
    found = torch.stack(draws)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = torch.stack([layer.train()(x) for _ in range(n)])
    error = 6 * ((found.var(0) + expected.var(0)) / n).sqrt() + 1e-12
    assert ((found.mean(0) - expected.mean(0)).abs() <= error).all()
    torch.testing.assert_close(found.var(0), expected.var(0), rtol=0.25, atol=1e-12)
    moved = found - found.mean(0)  # the same sign for all that one mask covers, up to the sign of x
    if not isinstance(layer, nn.AlphaDropout) and "Alpha" not in repr(layer):
        dropped = found == 0
        assert torch.equal(dropped[:, 0], dropped[:, 1])
        if not isinstance(layer, nn.Dropout):
            assert (dropped.flatten(3).sum(3) % dropped.flatten(3).shape[3] == 0).all()
    assert (moved.abs().amax(0) > 0).all() or layer.p == 1


def test_an_input_has_the_same_prediction_in_any_batch() -> None:
    predictor = mc_dropout(net(), samples=7)
    whole = predictor.predict(X, generator=seeded(1))
    for n in range(len(X)):
        one = predictor.predict(X[n : n + 1], generator=seeded(1))
        torch.testing.assert_close(one.probs, whole.probs[n : n + 1], **TIGHT)
        torch.testing.assert_close(one.epistemic, whole.epistemic[n : n + 1], **TIGHT)
    other = predictor.predict(X, generator=seeded(2))
    assert not torch.isclose(other.probs, whole.probs).any()


def test_only_dropout_layers_are_random_and_nothing_stays_changed() -> None:
    """A batch norm in training mode would see the batch; a network in training mode goes back to it."""
    network = net().train()
    with untouched(network):
        first, second = (mc_dropout(network, samples=3).predict(x, generator=seeded()) for x in (X, X[:2]))
    torch.testing.assert_close(first.probs[:2], second.probs, **TIGHT)


def test_an_exception_leaves_no_hook() -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 2:
                raise OSError("the disk is gone")
            return x

    network = net().append(Breaks())
    predictor = mc_dropout(network, samples=3)
    with untouched(network), pytest.raises(OSError, match="the disk is gone"):
        predictor.predict(X[:2])
    predictor.predict(X)


def test_a_users_hook_sees_the_masked_output() -> None:
    network, seen = net(), []
    network[3].register_forward_hook(lambda layer, args, output: seen.append((output == 0).any()))
    mc_dropout(network, samples=3).predict(X)
    assert all(seen[-3:])
    assert len(seen) == 4  # and one pass without masks


def test_any_posterior_predicts_by_dropout_at_its_mean() -> None:
    network = net()
    posterior = fit_laplace(network, [(X, LABELS)], structure="diag")
    expected = mc_dropout(network, samples=5).predict(X, generator=seeded(3))
    for of in (posterior, posterior.with_prior(2.0**40)):  # also if tuning has chosen the plain network
        found = of.predict(X, Dropout(samples=5), generator=seeded(3))
        assert torch.equal(found.probs, expected.probs)
    calibrated = posterior.calibrate([(X, LABELS)], Dropout(samples=5))
    assert [c.predictive for c in calibrated.calibrations] == ["dropout"]


def test_a_gradient_in_x_is_that_of_the_masked_networks() -> None:
    network, x = net(), X.clone().requires_grad_()
    posterior = fit_laplace(network, [(X, LABELS)], structure="diag")
    found = posterior.predict(x, Dropout(samples=3), generator=seeded(), differentiable=True)
    (gradient,) = torch.autograd.grad(found.probs[:, 0].sum(), x)

    def probs(x: Tensor) -> Tensor:
        moved = posterior.predict(x, Dropout(samples=3), generator=seeded())
        return moved.probs[:, 0].sum()

    step = 1e-6 * real(*X.shape, seed=9)
    difference = (probs(X + step) - probs(X - step)) / 2
    torch.testing.assert_close((gradient * step).sum(), difference, rtol=1e-5, atol=1e-14)


def held_out(n: int, seed: int) -> Any:
    """Labels that are more random than a network with large outputs says."""
    x = real(n, 3, seed=seed)
    y = (2 * x + real(n, 3, seed=seed + 1)).argmax(1)
    return DataLoader(TensorDataset(x, y), 50)


def test_it_is_calibrated_conformalized_and_evaluated() -> None:
    network = made(lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2)))
    with torch.no_grad():
        network[0].weight.copy_(64 * torch.eye(3))
        network[0].bias.zero_()
    plain = mc_dropout(network, samples=20)
    calibrated = plain.calibrate(held_out(300, 4))
    assert isinstance(calibrated, MCDropout)
    scores = [evaluate(p, held_out(400, 6), predictive="dropout")["nll"] for p in (plain, calibrated)]
    assert scores[1] < scores[0] - 0.1
    conformal = calibrated.conformalize(held_out(300, 4), level=0.8)
    sets = torch.cat([conformal.predict(x).gather(1, y[:, None]) for x, y in held_out(400, 6)])
    assert abs(float(sets.double().mean()) - 0.8) < 5 * (0.16 / 300 + 0.16 / 400) ** 0.5
    views = Augmented(plain, [lambda x: x, torch.neg])
    assert views.predict(X, "dropout", generator=seeded()).epistemic.mean() > 0.1


def test_what_has_no_mask_is_refused() -> None:
    plain = nn.Sequential(nn.Linear(3, 3))
    for network in (plain, net(p=0.0)):
        with pytest.raises(PosteriorError, match="has no dropout layer with p > 0"):
            mc_dropout(network)
    posterior = fit_laplace(plain.double(), [(X, LABELS)])
    with pytest.raises(PosteriorError, match="Sequential has no dropout layer with p > 0, so predictive='dropout'"):
        posterior.predict(X, "dropout")

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.linear(x), self.drop.p, self.training)

    with pytest.raises(PosteriorError, match=r"does not call its dropout layers \(drop\)"):
        mc_dropout(Functional().double()).predict(X)
    with pytest.raises(PosteriorError, match="no covariance of the weights for predictive='glm'"):
        mc_dropout(net()).predict(X, "glm")


def test_a_sequence_has_a_mask_for_each_position_and_a_reused_layer_one_for_each_call() -> None:
    drop = nn.Dropout(0.5)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.scale = drop, nn.Parameter(torch.ones(()).double())

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack((self.drop(x), self.drop(x)), 1).flatten(1) * self.scale

    x = torch.ones(2, 4, 50).double()
    outputs: list[Tensor] = []
    predictor = mc_dropout(Twice(), Gaussian())
    dropout.each_masked(predictor.posterior, x, 1, seeded(), outputs.append)
    masks = outputs[0].reshape(2, 2, 4, 50)  # [B, call, T, features]
    assert torch.equal(masks[0], masks[1])
    rows = masks[0].flatten(0, 1)
    assert len(rows.unique(dim=0)) == 8
    shorter: list[Tensor] = []
    dropout.each_masked(predictor.posterior, x[:, :3], 1, seeded(), shorter.append)
    assert torch.equal(shorter[0].reshape(2, 2, 3, 50), masks[:, :, :3])  # padding does not change the masks
