"""The dry run: errors before the first step, and a warning if the loss is not that of the likelihood."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from callback_cases import CLASSES, FEATURES, Classifier, draw, labelled, laplace, measured, trainer
from helpers.training import Lit
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import (
    Bernoulli,
    Gaussian,
    HeteroscedasticGaussian,
    L2MCallback,
    LowRank,
    OnlineLaplaceCallback,
    Subnetwork,
)
from lightning_bayes.curvature import low_rank
from lightning_bayes.likelihoods import Likelihood, LikelihoodError
from lightning_bayes.network import CurvatureError, DataError, SubsetError
from lightning_bayes.posterior.fit import fit_posterior
from lightning_bayes.posterior.prior import PriorError
from lightning_bayes.trainer.dry_run import mean_nll
from lightning_bayes.trainer.module import ModuleError

ONE_HOT = r"Categorical needs targets .* \[8\] with class .* use likelihood='binary' if .*, or y.argmax\(1\) for"


def l2m(**arguments: Any) -> L2MCallback:
    return L2MCallback(**{"prior_precision": 1.0, **arguments})


def online(**arguments: Any) -> OnlineLaplaceCallback:
    return OnlineLaplaceCallback(**{"likelihood": "classification", "prior_precision": 1e4, **arguments})


def batches(data: TensorDataset | None = None, batch_size: int = 8) -> DataLoader[Any]:
    return DataLoader(labelled(37) if data is None else data, batch_size, shuffle=True)


def with_targets(y: Tensor) -> DataLoader[Any]:
    return batches(TensorDataset(draw(37, FEATURES, seed=0), y))


def run(folder: Path, callback: L.Callback | None, model: L.LightningModule, data: Any = None, **options: Any) -> Any:
    """One epoch of five steps."""
    L.seed_everything(0, verbose=False)
    fit = trainer(folder, *([] if callback is None else [callback]), **{"max_epochs": 1, **options})
    fit.fit(model, batches() if data is None else data)
    return fit


# -- nothing of the user's is changed --------------------------------------------------------------------------------


class Counting(Classifier):
    """Batch norm, dropout, momentum, and a buffer that the network replaces with another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.losses: list[float] = []
        self.noise: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.noise.append(torch.randn(2))
        self.losses.append(loss.item())
        assert self.training
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.05)


CALLBACKS = {"full": lambda: laplace(structure="full"), "kron": laplace, "l2m": l2m}


@pytest.mark.parametrize("make", CALLBACKS.values(), ids=CALLBACKS)
def test_a_run_trains_bit_by_bit_as_it_does_without_the_callback(tmp_path: Path, make: Any) -> None:
    runs = []
    for callback in (None, make()):
        L.seed_everything(3, verbose=False)
        model = Counting()
        run(tmp_path, callback, model, accumulate_grad_batches=2)
        assert model.net[0]._forward_hooks == model._forward_hooks == {}
        runs.append(model)
    plain, watched = runs
    assert plain.losses == watched.losses
    torch.testing.assert_close(torch.stack(plain.noise), torch.stack(watched.noise), rtol=0, atol=0)
    for name, value in plain.state_dict().items():
        if name != "calls":  # which the fit itself moves on
            assert torch.equal(value, watched.state_dict()[name]), name


def test_an_error_leaves_everything_as_it_was(tmp_path: Path) -> None:
    L.seed_everything(3, verbose=False)
    model = Counting()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(LikelihoodError):
        run(tmp_path, laplace(likelihood="regression"), model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert model._forward_hooks == {}


# -- mistakes are errors before the first step -----------------------------------------------------------------------


class Stopped(Classifier):
    """Fails in the first step, so an expected error must come before it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("training has started")


def stopped(network: nn.Module) -> Stopped:
    model = Stopped()
    model.net = network  # type: ignore[assignment]
    return model


class NoForward(L.LightningModule):
    """As in Lightning's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)

    training_step = Stopped.training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Splits(Stopped):
    def split_batch(self, batch: Any) -> Any:
        return batch[0], batch[1], None


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


one_hot = F.one_hot(torch.arange(37) % CLASSES, CLASSES)
flat = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Flatten(0))
normed = nn.Sequential(nn.BatchNorm1d(FEATURES, track_running_stats=False), nn.Linear(FEATURES, CLASSES))
MISTAKES: dict[str, tuple[Any, Any, Any, Any, str]] = {
    "one-hot": (laplace, {}, Stopped, with_targets(one_hot.float()), ONE_HOT),
    "one-hot, L2M": (l2m, {}, Stopped, with_targets(one_hot.float()), ONE_HOT),
    "one-hot, paper": (l2m, {"scaling": "paper"}, Stopped, with_targets(one_hot.float()), ONE_HOT),
    "one-hot, online": (online, {}, Stopped, with_targets(one_hot.float()), ONE_HOT),
    "one-hot integers": (l2m, {}, Stopped, with_targets(one_hot), ONE_HOT),
    "class number": (laplace, {}, Stopped, with_targets(torch.full((37,), 7)), "Categorical got the target 7, but"),
    "regression": (laplace, {"likelihood": "regression"}, Stopped, None, "Gaussian needs floating-point targets"),
    "regression, L2M": (l2m, {"likelihood": "regression"}, Stopped, None, "Gaussian needs floating-point targets"),
    "binary": (l2m, {"likelihood": "binary"}, Stopped, None, r"Bernoulli needs targets of shape \[8, 3\]"),
    "subset": (laplace, {"subset": ["net.9"]}, Stopped, None, "the network has no parameter 'net.9'; did you mean"),
    "prior": (laplace, {"prior_precision": [1.0, 2.0]}, Stopped, None, "one for each of the 3 layers"),
    "no forward": (laplace, {}, NoForward, None, "the network NoForward cannot be run .*name the submodule .*network="),
    "network": (l2m, {"network": "net.4"}, Stopped, None, r"the network 'net.4' cannot be run .* of shape \[8, 4\]"),
    "tuple": (l2m, {}, lambda: stopped(Pair(4, 3)), None, "the network Stopped must return one tensor, but .* tuple"),
    "rows": (l2m, {}, lambda: stopped(flat), None, "one row per example, but 8 examples gave .*24"),
    "examples": (laplace, {}, lambda: stopped(normed), None, "net.0: batch norm without running statistics"),
    "split_batch": (laplace, {}, Splits, None, r"Splits.split_batch must return a pair \(x, y\), .* tuple of 3 parts"),
    "targets": (l2m, {}, Stopped, DataLoader([(torch.zeros(4), "a")] * 9, 3), "targets of a batch must be a tensor"),  # type: ignore[arg-type,list-item]
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*no optimizer")
@pytest.mark.parametrize(("make", "words", "model", "data", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_an_error_before_the_first_step(
    tmp_path: Path, make: Any, words: Any, model: Any, data: Any, says: str
) -> None:
    kinds = (LikelihoodError, SubsetError, PriorError, ModuleError, CurvatureError, DataError)
    with pytest.raises(kinds, match=says):
        run(tmp_path, make(**words), model(), data)


def wide(hidden: int = 100_000) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES))


@pytest.mark.parametrize("subset", ["all", Subnetwork(800_003)])
def test_a_full_matrix_that_cannot_fit_is_refused(tmp_path: Path, subset: Any) -> None:
    callback, model = laplace(structure="full", subset=subset), stopped(wide())
    with pytest.raises(CurvatureError, match=r"structure='full' over 800003 weights needs 2.88e\+03 GB, but cpu has"):
        run(tmp_path, callback, model, batches(labelled(100_000)))


def test_the_rows_of_few_data_fit(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="training has started"):
        run(tmp_path, laplace(structure="full"), stopped(wide()), batches(labelled(4)))


def test_a_low_rank_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    says = r"structure='lowrank' over 800003 weights needs .* GB, but cpu has .* GB: use a smaller rank=, structure="
    with pytest.raises(CurvatureError, match=says):
        run(tmp_path, laplace(structure=LowRank(rank=100_000)), stopped(wide()))


def test_a_trial_of_a_low_rank_is_one_product_with_two_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[torch.Size] = []
    monkeypatch.setattr(low_rank.BlockLanczos, "add", _noting(low_rank.BlockLanczos.add, products))
    network = nn.Sequential(nn.Linear(FEATURES, 200), nn.Tanh(), nn.Linear(200, CLASSES))
    laplace(structure=LowRank(rank=400)).try_fit(network, draw(2, FEATURES, seed=0), torch.tensor([0, 1]))
    assert products == [torch.Size([2, 200 * (FEATURES + 1) + 201 * CLASSES])]


def _noting(add: Any, shapes: list[torch.Size]) -> Any:
    def noted(self: Any, product: torch.Tensor) -> None:
        shapes.append(product.shape)
        add(self, product)

    return noted


def test_a_wide_full_matrix_is_not_built_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """For many weights, the dry run computes the same gradients without the matrix."""
    fitted: list[Any] = []

    def noted(network: Any, loader: Any, likelihood: Any, options: Any, **given: Any) -> Any:
        fitted.append(options.structure.kind)
        return fit_posterior(network, loader, likelihood, options, **given)

    monkeypatch.setattr("lightning_bayes.callbacks.laplace.fit_posterior", noted)
    callback = laplace(structure="full", curvature="fisher_mc")
    for width in (200, 5):
        network = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, CLASSES))
        callback.try_fit(network, draw(2, FEATURES, seed=0), torch.tensor([0, 1]))
    assert fitted == ["diag", "full"]


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(RuntimeError, match=r"taken/here, because .*taken is a file: give the Trainer another"):
        run(tmp_path / "taken" / "here", laplace(), Stopped())
    run(tmp_path / "taken" / "here", laplace(), Classifier(), fast_dev_run=1)  # which stores nothing


# -- the loss and the likelihood -------------------------------------------------------------------------------------

NOT_THE_LIKELIHOODS = "the loss of the training step, .* does not depend on the network's outputs as the negative log"


class Trained(Lit):
    """A network, and any loss of its outputs."""

    def __init__(self, loss: Any, outputs: int = CLASSES, *last: nn.Module, direct: bool = False) -> None:
        net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, outputs), *last)
        super().__init__(net, loss, partial(torch.optim.Adam, lr=0.01))
        self.direct = direct

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        f = self.net(batch[0]) if self.direct else self(batch[0])
        return {"loss": self.loss(f, batch[1])}


def mean_of(likelihood: Likelihood) -> Any:
    return lambda f, y: mean_nll(likelihood, f, y)


def with_penalty(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f, y) + 100.0  # as a penalty on the weights is, to the outputs


labels = with_targets((draw(37, 2, seed=1) > 0).float())
numbers = batches(measured(37))
FITTING: dict[str, tuple[Any, Any, dict[str, Any], Any]] = {
    "cross-entropy": (F.cross_entropy, (), {}, None),
    "a penalty": (with_penalty, (), {}, None),
    "a sum": (lambda f, y: F.cross_entropy(f, y, reduction="sum"), (), {}, None),
    "log-probabilities": (F.nll_loss, (CLASSES, nn.LogSoftmax(1)), {}, None),
    "yes or no": (F.binary_cross_entropy_with_logits, (2,), {"likelihood": "binary"}, labels),
    "squared error": (F.mse_loss, (2,), {"likelihood": Gaussian(0.3)}, numbers),
    "half of it": (lambda f, y: 0.5 * (f - y).square().sum(1).mean(), (2,), {"likelihood": "regression"}, numbers),
    "its sum": (lambda f, y: F.mse_loss(f, y, reduction="sum"), (2,), {"likelihood": "regression"}, numbers),
    "a noise each": (
        mean_of(Gaussian(torch.tensor([0.1, 2.0]))), (2,), {"likelihood": Gaussian(torch.tensor([0.1, 2.0]))}, numbers
    ),
    "predicted noise": (
        lambda f, y: F.gaussian_nll_loss(f[:, :2], y, f[:, 2:].exp()), (4,),
        {"likelihood": HeteroscedasticGaussian()}, numbers,
    ),
}  # fmt: skip


@pytest.mark.parametrize("direct", [False, True], ids=["self(x)", "self.net(x)"])
@pytest.mark.parametrize(("loss", "network", "words", "data"), FITTING.values(), ids=FITTING)
def test_a_loss_that_is_the_likelihoods_is_no_warning(
    tmp_path: Path, loss: Any, network: Any, words: Any, data: Any, direct: bool
) -> None:
    """Warnings are errors here. Dropout, and terms that do not depend on the outputs, do not matter."""
    run(tmp_path, laplace(tune=None, **words), Trained(loss, *network, direct=direct), data, limit_train_batches=1)


def through_softmax(f: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(f.log(), y)


OTHERS: dict[str, tuple[Any, Any, dict[str, Any], Any, str]] = {
    "softmax": (through_softmax, (CLASSES, nn.Softmax(1)), {}, None, "are probabilities, but logits are expected"),
    "sigmoid": (
        F.binary_cross_entropy, (2, nn.Sigmoid()), {"likelihood": Bernoulli()}, labels, "softmax or sigmoid"
    ),
    "a layer below": (F.cross_entropy, (), {"network": "net.0"}, None, "network= that is not the one"),
    "label smoothing": (lambda f, y: F.cross_entropy(f, y, label_smoothing=0.2), (), {}, None, "label smoothing"),
    "class weights": (
        lambda f, y: F.cross_entropy(f, y, torch.tensor([1.0, 2.0, 3.0])), (), {}, None, "class weights"
    ),
    "absolute error": (F.l1_loss, (2,), {"likelihood": "regression"}, numbers, "another likelihood="),
}  # fmt: skip


@pytest.mark.parametrize("make", [laplace, l2m])
@pytest.mark.parametrize(("loss", "network", "words", "data", "cause"), OTHERS.values(), ids=OTHERS)
def test_a_loss_that_is_not_the_likelihoods_is_a_warning(
    tmp_path: Path, make: Any, loss: Any, network: Any, words: Any, data: Any, cause: str
) -> None:
    with pytest.warns(UserWarning, match=f"(?s){NOT_THE_LIKELIHOODS}.*posterior assumes.*{cause}"):
        run(tmp_path, make(**words), Trained(loss, *network), data, fast_dev_run=1)


def weighted(f: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(f, y, pos_weight=torch.tensor([2.0, 3.0, 5.0]))


@pytest.mark.parametrize("multi_label", [False, True])
def test_both_numbers_are_said(tmp_path: Path, multi_label: bool) -> None:
    """Means over all targets, the default of torch's losses."""
    x, y = labelled(5).tensors
    loss, plain, likelihood = F.multi_margin_loss, F.cross_entropy, "classification"
    if multi_label:
        y, likelihood = (draw(5, 3, seed=1) > 0).float(), "binary"
        loss, plain = weighted, F.binary_cross_entropy_with_logits
    torch.manual_seed(0)
    model = Trained(loss)
    model.net[2] = nn.Identity()
    f = model(x)
    said = rf"{loss(f, y):.6g} for the first batch, .* \(mean {plain(f, y):.6g}\)"
    with pytest.warns(UserWarning, match=said):
        run(tmp_path, laplace(likelihood=likelihood), model, DataLoader(TensorDataset(x, y), 5), fast_dev_run=1)


@pytest.mark.parametrize("samples", [1, 2])
def test_an_online_posterior_looks_at_the_loss_of_its_samples(tmp_path: Path, samples: int) -> None:
    run(tmp_path, online(prior_precision=1.0, train_samples=samples), Trained(F.cross_entropy), fast_dev_run=1)
    with pytest.warns(UserWarning, match=NOT_THE_LIKELIHOODS):
        run(tmp_path, online(prior_precision=1.0, train_samples=samples), Trained(F.multi_margin_loss), fast_dev_run=1)


class Unseen(Trained):
    """No module returns the tensor that the loss uses."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.0 * self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(1.0 * self.net(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("loss", "data", "words"),
    [
        (F.cross_entropy, None, {}),
        (lambda f, y: F.cross_entropy(f, y) + 0.1, None, {}),  # a penalty
        (F.mse_loss, numbers, {"likelihood": Gaussian(0.3)}),
        (lambda f, y: 0.5 * F.mse_loss(f, y, reduction="sum"), numbers, {"likelihood": "regression"}),
    ],
)
def test_outputs_that_no_module_returns_are_judged_by_the_value(
    tmp_path: Path, loss: Any, data: Any, words: Any
) -> None:
    outputs = CLASSES if data is None else 2
    run(tmp_path, laplace(tune=None, **words), Unseen(loss, outputs), data, fast_dev_run=1)
    with pytest.warns(UserWarning, match=NOT_THE_LIKELIHOODS):
        run(tmp_path, laplace(**words), Unseen(lambda f, y: 40 * loss(f, y), outputs), data, fast_dev_run=1)


class Manual(Trained):
    automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(0.3 * super().training_step(batch, batch_idx)["loss"])
        self.optimizers().step()  # type: ignore[union-attr]


class Skips(Trained):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 0 else super().training_step(batch, batch_idx)


class LBFGS(Trained):
    """Evaluates the batch at several weights."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("kind", [Manual, Skips, LBFGS])
def test_other_kinds_of_steps_are_no_warning(tmp_path: Path, kind: Any) -> None:
    model = kind(F.cross_entropy)
    run(tmp_path, laplace(tune=None), model, limit_train_batches=2)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("options", [{"precision": "bf16-mixed"}, {"accumulate_grad_batches": 3}], ids=str)
def test_precision_and_accumulation_are_no_warning(tmp_path: Path, options: Any) -> None:
    run(tmp_path, laplace(tune=None), Trained(F.cross_entropy), limit_train_batches=3, **options)
    with pytest.warns(UserWarning, match=NOT_THE_LIKELIHOODS):
        run(tmp_path, laplace(tune=None), Trained(F.multi_margin_loss), limit_train_batches=3, **options)


def test_a_compiled_module_is_judged_by_the_value(tmp_path: Path) -> None:
    """Compiled modules get no hook."""
    for factor, warned in ((1, False), (40, True)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = torch.compile(Trained(lambda f, y, c=factor: c * F.cross_entropy(f, y)), backend="eager")
            run(tmp_path, laplace(tune=None), model, limit_train_batches=1)  # type: ignore[arg-type]
        assert any("the loss of the training step" in str(w.message) for w in said) is warned


class Auxiliary(nn.Linear):
    """Returns more outputs in training, like Inception, and has a norm that needs several examples."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, x: Tensor) -> Any:
        f = super().forward(self.norm(x))
        return (f, x) if self.training else f


class OneExample(Trained):
    def __init__(self) -> None:
        super().__init__(lambda f, y: F.cross_entropy(f[0], y))
        self.net = Auxiliary()  # type: ignore[assignment]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.norm.eval()  # type: ignore[union-attr]


def test_the_network_is_judged_as_the_fit_sees_it(tmp_path: Path) -> None:
    run(tmp_path, laplace(tune=None), OneExample(), batches(batch_size=1), limit_train_batches=2)


def test_a_large_network_is_told_what_its_predictions_will_cost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Wide(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(FEATURES, 1000), nn.Tanh(), nn.Linear(1000, 1000), nn.Linear(1000, CLASSES)
            )

    with caplog.at_level("INFO"):
        for subset in ("auto", "all"):
            run(tmp_path, laplace(tune=None, calibrate=None, subset=subset), Wide(), max_steps=1)
        run(tmp_path, laplace(tune=None, calibrate=None), Classifier(), max_steps=1)
    said = [message for message in caplog.messages if "to predict" in message]
    assert len(said) == 2  # nothing of a small network
    for message, chosen, other in zip(said, ("all", "all"), ("last_layer", "last_layer"), strict=True):
        assert message.startswith(f"laplace: a posterior over {chosen} 1,")
        assert f"subset={other!r}" in message
        assert message.count("plain epochs to fit") == message.count("forward passes of a batch to predict") == 2
        assert "to tune" not in message
