"""The prior in the gradient: training is the same as with the prior written into the loss, at the loss's own scale."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from callback_cases import trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from marginal_cases import (
    EXAMPLES,
    NOISE,
    OUTPUTS,
    Net,
    adam,
    classes,
    data_of,
    fixed,
    flat,
    loader,
    marginal,
    penalised,
    regressor,
    same,
    sgd,
    trained,
    values,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_bayes import Gaussian, Learning, MarginalLikelihoodCallback
from lightning_bayes.callbacks.marginal_likelihood import add_prior_gradient
from lightning_bayes.network.errors import DataError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*training ended before the prior was learned"),
]
BOTH = {"": 3.0}


def gaussian(f: Tensor, y: Tensor) -> Tensor:
    return -torch.distributions.Normal(f, NOISE).log_prob(y).sum(1).mean()


def as_float() -> TensorDataset:
    x, y = classes().tensors
    return TensorDataset(x.float(), y)


LOSSES: dict[str, tuple[Any, float]] = {
    "cross entropy": (Net(F.cross_entropy), 1.0),
    "sixth of it": (Net(lambda f, y: F.cross_entropy(f, y) / 6), 1 / 6),
    "mean squared error": (regressor(F.mse_loss), 2 * NOISE**2 / OUTPUTS),
    "half squared error": (regressor(lambda f, y: 0.5 * (f - y).square().sum(1).mean()), NOISE**2),
    "Gaussian": (regressor(gaussian), 1.0),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_training_is_that_with_the_prior_in_the_loss(loss: str, tmp_path: Path) -> None:
    model, scale = LOSSES[loss]
    found, _ = trained(tmp_path, model, fixed(model, prior_precision=3.0))
    expected, _ = trained(tmp_path, penalised(model, scale, BOTH))
    assert not torch.allclose(flat(expected), flat(trained(tmp_path, model)[0]), rtol=1e-3)
    same(flat(found), flat(expected))


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate_grad_batches": 2},  # the third batch is a separate step
    "clipped": {"gradient_clip_val": 0.05},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_accumulation_and_clipping_see_the_whole_gradient(options: str, optimizer: Any, tmp_path: Path) -> None:
    model, how = Net(optimizer=optimizer), OPTIONS[options]
    found, _ = trained(tmp_path, model, fixed(prior_precision=3.0), **how)
    same(flat(found), flat(trained(tmp_path, penalised(model, 1.0, BOTH), **how)[0]))


def test_mixed_precision(tmp_path: Path) -> None:
    """The scale of the loss is recognised from 16-bit outputs."""
    model, how = Net(optimizer=sgd).float(), {"precision": "bf16-mixed", "data": loader(as_float())}
    callback = fixed(prior_precision=3.0)
    found, _ = trained(tmp_path, model, callback, **how)
    assert callback.state_dict()["loss_scale"] == 1.0
    expected, _ = trained(tmp_path, penalised(model, 1.0, BOTH), **how)
    torch.testing.assert_close(flat(found), flat(expected), rtol=1e-4, atol=1e-5)


def test_each_layer_has_its_prior_and_other_weights_none(tmp_path: Path) -> None:
    model = Net()
    found, _ = trained(tmp_path, model, fixed(prior_precision=[5.0, 0.5]))
    same(flat(found), flat(trained(tmp_path, penalised(model, 1.0, {"net.0": 5.0, "net.2": 0.5}))[0]))
    for subset, start in ((["net.0.weight"], "net.0.weight"), ("last_layer", "net.2")):
        found, _ = trained(tmp_path, model, fixed(prior_precision=5.0, subset=subset))
        same(flat(found), flat(trained(tmp_path, penalised(model, 1.0, {start: 5.0}))[0]))


def test_frozen_weights_stay(tmp_path: Path) -> None:
    model = Net()
    model.net[0].requires_grad_(False)
    found, _ = trained(tmp_path, model, fixed(prior_precision=3.0))
    same(flat(found), flat(trained(tmp_path, penalised(model, 1.0, {"net.2": 3.0}))[0]))
    assert torch.equal(found.net[0].weight, model.net[0].weight)


def test_thawed_weights_get_their_prior_in_the_next_epoch(tmp_path: Path) -> None:
    class Thaw(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                pl_module.net[0].requires_grad_(True)

    class Slow(Net):
        def configure_optimizers(self) -> Any:
            return adam(self.parameters())

    model = Slow()
    model.net[0].requires_grad_(False)
    callback = marginal(prior_precision=3.0, evidence=Learning(keep="last"))
    trained(tmp_path, model, Thaw(), callback, max_epochs=1)
    assert set(callback.state_dict()["hyperparameters"]["prior_precision"]) == {"net.2"}
    callback = marginal(prior_precision=3.0, evidence=Learning(keep="last"))
    trained(tmp_path, model, Thaw(), callback, max_epochs=3)
    assert set(callback.state_dict()["hyperparameters"]["prior_precision"]) == {"net.0", "net.2"}


class Manual(Net):
    """Two optimizers by hand, one for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [adam(self.net[0].parameters()), sgd(self.net[2].parameters())]


@pytest.mark.parametrize("words", [{"loss_scale": 1.0}, {}], ids=["given", "assumed"])
def test_manual_optimization_of_several_optimizers(words: Any, tmp_path: Path) -> None:
    said = "could not be compared with the likelihood: it is taken to be 1 times"
    with nullcontext() if words else pytest.warns(UserWarning, match=said):
        found, _ = trained(tmp_path, Manual(), fixed(prior_precision=3.0, **words))
    same(flat(found), flat(trained(tmp_path, penalised(Manual(), 1.0, BOTH))[0]))


def test_lazy_layers_get_their_prior_from_the_first_step(tmp_path: Path) -> None:
    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            weight, bias = self.net[0].weight.detach().clone(), self.net[0].bias.detach().clone()
            self.net[0] = nn.LazyLinear(5).double()
            self.net[0].register_forward_pre_hook(self._fill(weight, bias))

        def _fill(self, weight: Tensor, bias: Tensor) -> Any:
            def fill(layer: Any, args: Any) -> None:
                if not self.filled:
                    self.filled = True
                    with torch.no_grad():
                        layer.weight.copy_(weight)
                        layer.bias.copy_(bias)

            self.filled = False
            return fill

        def configure_optimizers(self) -> Any:
            return sgd(self.parameters())

    found, _ = trained(tmp_path, Lazy(), fixed(prior_precision=3.0))
    same(flat(found), flat(trained(tmp_path, penalised(Net(optimizer=sgd), 1.0, BOTH))[0]))


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")
def test_a_step_without_a_loss_adds_nothing(tmp_path: Path) -> None:
    class Skipping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    found, _ = trained(tmp_path, Skipping(optimizer=sgd), fixed(prior_precision=3.0))
    same(flat(found), flat(trained(tmp_path, penalised(Skipping(optimizer=sgd), 1.0, BOTH))[0]))


def test_a_prior_too_strong_for_the_learning_rate_does_not_explode() -> None:
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    p.grad = torch.zeros(2)
    optimizer = torch.optim.SGD([p], 0.1)
    add_prior_gradient(optimizer, {"p": p}, {"p": 1e6})
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.zeros(2))
    add_prior_gradient(optimizer, {"p": p}, {"p": 0.5}, scale=4.0)  # a fused optimizer divides by it
    torch.testing.assert_close(p.grad, torch.tensor([10.0, -20.0]))


# -- the scale of the loss ---------------------------------------------------------------------------------------------


def test_the_noise_that_is_learned_is_no_news_to_the_loss(tmp_path: Path) -> None:
    """Priors and noise of each epoch in the loss, by hand: `c (σ/σ₀)²` times the squared error."""
    learned: list[Any] = []

    class Note(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            learned.append(callback.state_dict()["hyperparameters"])

    model = regressor()
    callback = marginal(model, prior_precision=2.0, evidence=Learning(steps=5, keep="last"))
    found, _ = trained(tmp_path, model, Note(), callback, max_epochs=4)
    assert len({round(η["noise"], 6) for η in learned}) == 4

    class Put(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            η = learned[trainer.current_epoch]
            priors = η["prior_precision"] or {"net.0": 2.0, "net.2": 2.0}
            pl_module.penalty = penalised(model, 2 * (NOISE * η["noise"]) ** 2 / OUTPUTS, priors).penalty

    expected, _ = trained(tmp_path, model, Put(), max_epochs=4)
    same(flat(found), flat(expected))


def test_a_given_scale_that_the_loss_does_not_have_is_a_warning(tmp_path: Path) -> None:
    model = Net()
    with pytest.warns(UserWarning, match=r"loss_scale=0.5 was given, but the loss of the first batch is 1 times"):
        found, _ = trained(tmp_path, model, fixed(prior_precision=3.0, loss_scale=0.5))
    same(flat(found), flat(trained(tmp_path, penalised(model, 0.5, BOTH))[0]))


def test_a_loss_of_another_likelihood_is_a_warning_and_torchs_scale_is_assumed(tmp_path: Path) -> None:
    def smoothed(f: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(f, y, label_smoothing=0.2)

    model = Net(smoothed)
    with pytest.warns(UserWarning, match="does not depend on the network's outputs as the negative log-likelihood"):
        found, _ = trained(tmp_path, model, fixed(prior_precision=3.0))
    same(flat(found), flat(trained(tmp_path, penalised(model, 1.0, BOTH))[0]))


# -- before training ---------------------------------------------------------------------------------------------------


def refused(folder: Path, model: Any, *callbacks: Any, match: str, data: Any = None) -> None:
    before = flat(model)
    with pytest.raises(ValueError, match=match):
        trainer(folder, *callbacks, precision="64-true").fit(model, data_of(model) if data is None else data)
    assert torch.equal(flat(model), before)


def test_weight_decay_is_an_error_that_says_so(tmp_path: Path) -> None:
    said = r"AdamW has weight_decay=0.01 for net.0.weight, net.0.bias, net.2.weight, …, but marglik already learns"
    refused(tmp_path, Net(optimizer=torch.optim.AdamW), marginal(), match=said)

    def second_layer(parameters: Any) -> torch.optim.Optimizer:
        first, others = list(parameters)[:2], list(parameters)[2:]
        return torch.optim.SGD([{"params": first}, {"params": others, "weight_decay": 0.1}], 0.1)

    refused(tmp_path, Net(optimizer=second_layer), marginal(), match="SGD has weight_decay=0.1 for net.2.weight, net.2")
    refused(tmp_path, Net(optimizer=second_layer), marginal(subset="last_layer"), match=r"weight_decay=0.1 for net.2")
    trained(tmp_path, Net(optimizer=second_layer), marginal(subset=["net.0"]), max_epochs=1)  # is not its business


def test_line_searches_averages_and_second_callbacks_are_errors(tmp_path: Path) -> None:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe")

    refused(tmp_path, Net(optimizer=lbfgs), marginal(), match="LBFGS with line_search_fn='strong_wolfe' compares")
    two = (marginal(), marginal(name="other"))
    refused(tmp_path, Net(), *two, match="give the Trainer one MarginalLikelihoodCallback")
    averaged = StochasticWeightAveraging(0.01)
    refused(tmp_path, Net(), averaged, marginal(), match="StochasticWeightAveraging has averaged .* use keep='last'")


def test_a_prior_is_one_number_or_one_for_each_layer(tmp_path: Path) -> None:
    for wrong in ([1.0] * 3, [1.0] * 43):  # not even one for each weight
        refused(tmp_path, Net(), marginal(prior_precision=wrong), match="one for each of the 2 layers")


def test_data_that_cannot_be_counted_need_n_data(tmp_path: Path) -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(loader(values()))

    with pytest.raises(DataError, match="pass n_data="):
        trained(tmp_path, regressor(), fixed(regressor()), data=Stream())
    model = regressor()
    found, _ = trained(tmp_path, model, fixed(model, n_data=EXAMPLES, prior_precision=3.0), data=Stream())
    same(flat(found), flat(trained(tmp_path, penalised(model, 2 * NOISE**2 / OUTPUTS, BOTH))[0]))


def test_the_network_may_be_a_part_of_the_module(tmp_path: Path) -> None:
    model = Net()
    callback = MarginalLikelihoodCallback(network="net", prior_precision=3.0, burn_in_epochs=9, progress=False)
    found, _ = trained(tmp_path, model, callback)
    same(flat(found), flat(trained(tmp_path, penalised(model, 1.0, BOTH))[0]))
    assert callback.posterior.subset.layers == ("0", "2")


def test_noise_per_output(tmp_path: Path) -> None:
    def loss(f: Tensor, y: Tensor) -> Tensor:
        return 0.5 * ((f - y) / torch.tensor([0.4, 0.8])).square().sum(1).mean()

    model = regressor(loss)
    likelihood = Gaussian(torch.tensor([0.4, 0.8], dtype=torch.float64))
    found, _ = trained(tmp_path, model, fixed(model, likelihood=likelihood, prior_precision=3.0))
    same(flat(found), flat(trained(tmp_path, penalised(model, 1.0, BOTH))[0]))
