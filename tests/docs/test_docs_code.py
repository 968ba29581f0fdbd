"""The code in the documentation runs, and gives what the text says it gives."""

import ast
import inspect
import logging
import pkgutil
import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.networks import mlp
from helpers.oracles import jacobian
from helpers.tensors import seeded
from helpers.training import Lit
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import (
    GLM,
    GaussianPosterior,
    Kron,
    LaplaceCallback,
    LaplacePosterior,
    Network,
    Prior,
    Tuning,
    fit_laplace,
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_page(path: Path, **given: Any) -> dict[str, Any]:
    """Run a page's Python blocks one after the other in one namespace, with the page's own line numbers in errors."""
    text = path.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "docs", **given}
    for block in FENCE.finditer(text):
        lines_above = text[: block.start(1)].count("\n")
        exec(compile("\n" * lines_above + block.group(1), str(path), "exec"), names)
    return names


def said_on(page: str, pattern: str) -> list[str]:
    """What whole lines of a page say."""
    return re.findall(f"^{pattern}$", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.MULTILINE)


def class_source(text: str, name: str) -> str:
    """The source of a class as it is written, from whichever block of code holds it."""
    found = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    return ast.get_source_segment(text, found) or ""


class Model(Lit):
    """The module that a reader already has; it asks for one epoch, to save the test's time."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(mlp(4, width, 3))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.loss(self(batch[0]), batch[1]))

    def on_test_end(self) -> None:
        self.tested = dict(self.trainer.callback_metrics)  # predict clears them

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = True


class Patient(Model):
    """A wider one, which trains for all epochs."""

    def __init__(self) -> None:
        super().__init__(20)

    def on_train_epoch_end(self) -> None:
        pass


class Data(L.LightningDataModule):
    batch_size = 10

    def loader(self) -> DataLoader[Any]:
        x, y = torch.randn(24, 4, generator=seeded()), torch.randint(3, (24,), generator=seeded(1))
        return DataLoader(TensorDataset(x, y), batch_size=self.batch_size)

    train_dataloader = test_dataloader = predict_dataloader = loader


def classes(n: int, shift: float = 0.0) -> TensorDataset:
    return TensorDataset(torch.randn(n, 4) + shift, torch.arange(n) % 3)


def scores(*of: str) -> set[str]:
    return {f"test_{score}_{name}" for score in ("nll", "acc", "ece", "brier") for name in of}


def test_the_likelihood_of_ones_own_is_the_one_that_is_tested() -> None:
    page = (DOCS / "likelihoods.md").read_text(encoding="utf-8")
    block = next(b.group(1) for b in FENCE.finditer(page) if "class Poisson" in b.group(1))
    tested = (ROOT / "tests" / "likelihoods" / "test_own_likelihood.py").read_text(encoding="utf-8")
    assert class_source(block, "Poisson") == class_source(tested, "Poisson")


def test_likelihoods() -> None:
    names = run_page(DOCS / "likelihoods.md")
    assert names["tagging"].probs.shape == names["tagging"].label.shape == names["tagging"].epistemic.shape == (60, 4)
    categorical, mean = names["Categorical"](), names["mean"]
    sure = categorical.integrate(mean, names["sure"], link="probit").probs
    unsure = categorical.integrate(mean, names["unsure"], link="probit").probs
    torch.testing.assert_close(sure, mean.softmax(1), rtol=0.01, atol=0)
    assert (unsure - 1 / 3).abs().max() < 0.5 * (sure - 1 / 3).abs().max()

    H, network = names["H"], names["network"]
    assert H.n_data == 96
    with torch.no_grad():
        rates = [(network(x).exp(), y) for x, y in names["loader"]]
    expected = sum(torch.distributions.Poisson(rate).log_prob(y).double().sum() for rate, y in rates)
    torch.testing.assert_close(H.log_likelihood, expected, rtol=1e-5, atol=0)
    assert H.structure.size == sum(p.numel() for p in network.parameters())


def test_structures() -> None:
    names = run_page(DOCS / "structures.md")
    torch.testing.assert_close(names["P"].to_dense(), torch.diag(torch.tensor([4.5, 1.5, 0.5])))


def test_curvature(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "lightning_bayes"):
        names = run_page(DOCS / "curvature.md")
    H, x = names["H"], names["x"]
    squares = jacobian(names["network"], x).square().sum((0, 1))  # no more than one layer above
    torch.testing.assert_close(names["diagonal"](x, torch.zeros(32, 3)), squares, rtol=1e-4, atol=1e-5)
    assert (H.n_data, H.structure.size, H.subset.size) == (64, 40 + 8 + 435, 40 + 8 + 435)
    assert (names["posterior"].n_data, names["posterior"].precision.size) == (96, 64 * 300 + 300 + 602 + 192)
    (said,) = said_on("curvature", r"(curvature blocks: .*)")
    assert said in caplog.messages


def test_networks_page_reads_a_tagger() -> None:
    names = run_page(DOCS / "networks.md", LitNet=Model, model=Model(), dm=Data())
    batch = names["batch"]
    assert names["DictNet"]().split_batch({"image": 1, "class": 2}) == (1, 2)
    assert {"nll_map", "nll_laplace", "acc_laplace"} <= set(names["numbers"])
    assert names["callback"].posterior.n_data == 24
    assert names["posterior"].predict({"input_ids": batch["input_ids"]}).probs.shape == (6, 3, 5)
    assert names["tagger"].network == Network(output="logits", class_dim=-1)
    assert names["of_images"].predict(names["images"], GLM(samples=3)).probs.shape == (40, 300)


def test_metrics() -> None:
    names = run_page(DOCS / "metrics.md")
    for metric in ("nll", "ece"):
        (said,) = said_on("metrics", rf"{metric}\.compute\(\)\s+# (\S+)")
        assert float(names[metric].compute()) == pytest.approx(float(said), abs=5e-5)
    (said,) = said_on("metrics", r"ood\.compute\(\)\s+# (.*)")
    assert {k: float(v) for k, v in names["ood"].compute().items()} == pytest.approx(ast.literal_eval(said))
    assert names["ax"].get_xlabel() == "confidence"


def test_cost() -> None:
    names = run_page(DOCS / "cost.md", network=mlp(4, 6), x=torch.randn(8, 4))
    assert names["cost"].predict > 1
    assert names["cost"].epochs(50_000) > 0


def test_unknown_inputs() -> None:
    x, y = classes(90).tensors
    train, held_out = ([(x[part], y[part])] for part in (slice(0, 30), slice(30, 90)))
    names = run_page(DOCS / "unknown.md", network=mlp(4, 6), train_loader=train, val_loader=held_out, x=x[:5])
    torch.testing.assert_close(names["prediction"].novelty, names["posterior"].novelty(x[:5]))
    assert names["alarm"].shape == (5,)


def test_conformal() -> None:
    names = run_page(DOCS / "conformal.md")
    assert 0 < len(names["kept"]) < 500
    assert float(names["held"]) > 0.87
    assert torch.equal(names["sets"], names["conformal"].predict(names["x_new"]))


def test_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page(DOCS / "predictions.md")
    assert said_on("predictions", r"print\(prediction\)  # (.*)") == [capsys.readouterr().out.strip()]
    assert names["arrays"]["label"].shape == (10,)
    assert names["refined"].mean.shape == names["posterior"].mean.shape
    assert names["posterior"].predict(names["x"], predictive="gp").probs.shape == (1400, 3)


def test_tuning() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).eval()
    loader = DataLoader(classes(40), 8)
    names = run_page(DOCS / "tuning.md", posterior=fit_laplace(network, loader), train_loader=loader)
    assert names["tuned"].prior_precision.unique().numel() == 2  # of the layer before the norm, and of the others


def test_optimisation() -> None:
    names = run_page(DOCS / "optimisation.md")
    assert ((names["place"] > 1) & (names["place"] < 2)).all()  # in the gap
    assert names["gradient"].shape == (2, 1)
    assert all(p.grad is not None for p in names["network"].parameters())  # of the training, which nothing has changed
    assert float(names["f"](names["minimum"][None])) == pytest.approx(float(names["f"](names["grid"]).min()), abs=1e-4)
    mean, covariance = names["mean"].flatten(), names["covariance"]
    draws = names["many"].flatten(1)
    assert draws.shape == (500, 5)
    assert ((draws.mean(0) - mean) / covariance.diagonal().sqrt()).abs().max() < 5 / 500**0.5


def test_active_learning() -> None:
    x, y = classes(60).tensors
    own = {"network": nn.Linear(4, 3), "x": x, "y": y, "labelled": torch.arange(20), "pool": torch.arange(20, 60)}
    names = run_page(DOCS / "active_learning.md", **own)
    information = names["information"]
    assert information.shape == (40,)
    assert (information >= 0).all()
    assert set(information.argsort()[-10:].tolist()) == set(names["chosen"].tolist())


class Continual(Lit):
    """A training step with one more term."""

    penalty: Any = None

    def __init__(self) -> None:
        super().__init__(mlp(4, 5))
        self.penalties: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.penalties.append(torch.zeros(()) if self.penalty is None else self.penalty())
        return super().training_step(batch, batch_idx) + self.penalties[-1]


def test_continual() -> None:
    model, tasks = Continual(), [DataLoader(classes(20, task), 8) for task in range(2)]
    posterior = run_page(DOCS / "continual.md", model=model, tasks=tasks)["posterior"]
    assert float(posterior.penalty(model.net).detach()) == 0
    of_first, of_second = (torch.stack(part).detach() for part in (model.penalties[:15], model.penalties[15:]))
    assert (of_first == 0).all()
    assert of_second[0] == 0 < of_second[1:].min()  # it starts at the mean
    alone = posterior.curvature.structure.diagonal().sum() + posterior.mean.numel()
    assert posterior.precision.diagonal().sum() > 1.2 * alone  # what the first task has added


def test_every_name_of_the_api_page_exists() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    entries = re.split(r"^::: ", page, flags=re.MULTILINE)[1:]
    assert len(entries) > 20
    for entry in entries:
        path, _, options = entry.partition("\n")
        thing = pkgutil.resolve_name(path.strip())
        listed = re.search(r"members: \[(.*?)\]", options) or re.search(r"members:\n((?:\s+- \w+\n)+)", options)
        for name in re.findall(r"\w+", listed.group(1)) if listed else []:
            assert hasattr(thing, name), f"{path.strip()} has no {name}"


def test_every_module_and_file_that_a_page_names_exists() -> None:
    for page in DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"\blightning_bayes(?:\.\w+)+", text):
            pkgutil.resolve_name(name)
        for path in re.findall(r"\b(?:recipes|benchmarks)/[\w/.]*\w", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
        for module in re.findall(r"python -m ([\w.]+)", text):
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), f"{page.name}: {module}"


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=lambda path: path.name)
def test_front_page(page: Path) -> None:
    loader = Data().loader()
    x = next(iter(loader))[0]
    own = {"network": nn.Linear(4, 3), "loader": loader, "validation": loader, "x": x}
    own["held_out"] = DataLoader(classes(20), batch_size=7)
    names = run_page(page, model=Model(), dm=Data(), LitNet=Model, **own)
    assert scores("map", "laplace") <= set(names["model"].tested)
    assert [tuple(p.probs.shape) for p in names["out"]] == [(10, 3), (10, 3), (4, 3)]
    assert names["laplace"].posterior.n_data == 24
    if "prediction" in names:
        torch.testing.assert_close(names["prediction"].probs.sum(1), torch.ones(10))
        assert names["posterior"].n_data == 24
    if "restored" in names:
        assert names["DictNet"]().split_batch({"x": 1, "y": 2}) == (1, 2)
        assert {"nll_map", "nll_laplace", "acc_laplace"} <= set(names["numbers"])
        torch.testing.assert_close(names["restored"].mean, names["laplace"].posterior.mean)
        torch.testing.assert_close(names["callback"].posterior.mean, names["laplace"].posterior.mean)
    if "net" in names:
        weights = [name for name, _ in names["LitNet"]().named_parameters()]
        assert list(names["net"].log_sigma.keys()) == weights


def test_deployment() -> None:
    dm, network = Data(), mlp(4, 8, 3)
    dm.val_dataloader = dm.loader
    laplace = LaplaceCallback(network="net", save=False)
    trainer = L.Trainer(logger=False, max_epochs=1, enable_progress_bar=False, accelerator="cpu", callbacks=[laplace])
    trainer.fit(model := Model(), dm)
    trainer.save_checkpoint("trained.ckpt")
    x = next(iter(dm.loader()))[0]
    names = run_page(DOCS / "deploy.md", model=model, dm=dm, x=x, network=network)
    assert len(names["prediction"]["novelty_p"]) == 10
    new = x[:3] + 0.1  # p-values of the held-out inputs themselves would depend on rounding
    expected = names["posterior"].predict(new)
    for name, t in names["served"](new).items():
        torch.testing.assert_close(t, getattr(expected, name))
    torch.testing.assert_close(names["of_network"].predict(x).probs, laplace.posterior.predict(x).probs)
    shared = GaussianPosterior.load("shared/posterior.pt", network)
    torch.testing.assert_close(shared.mean, laplace.posterior.mean)
    assert "Categorical posterior of 24 examples" in Path("shared/README.md").read_text(encoding="utf-8")


def test_a_module_that_is_trained_already() -> None:
    before = L.Trainer(logger=False, max_epochs=1, enable_progress_bar=False, accelerator="cpu")
    before.fit(Model(), Data())
    before.save_checkpoint("last_week.ckpt")
    names = run_page(DOCS / "trained.md", LitNet=Model, dm=Data(), x=next(iter(Data().loader()))[0])
    assert {"test_nll_map", "test_nll_laplace"} <= set(names["model"].tested)
    assert [len(p) for p in names["out"]] == [10, 10, 4]
    summary = names["posterior"].summary()
    assert (summary.n_weights, summary.n_data) == (67, 24)
    assert names["of_average"].n_data == 24


def test_dense() -> None:
    x, y = torch.randn(8, 1, 6, 5), torch.randint(4, (8, 6, 5))
    y[0] = 255
    (dm := Data()).train_dataloader = dm.test_dataloader = dm.predict_dataloader = lambda: DataLoader(
        TensorDataset(x, y), batch_size=5
    )
    network = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 1))
    model = Model()
    model.net, model.loss = network, partial(nn.functional.cross_entropy, ignore_index=255)
    names = run_page(DOCS / "dense.md", model=model, dm=dm)
    assert scores("laplace") <= set(model.tested)
    assert names["prediction"].probs.shape == names["prediction"].epistemic.shape == (5, 4, 6, 5)
    assert names["prediction"].entropy.shape == (5, 6, 5)
    assert names["laplace"].posterior.curvature.kind == "fisher_mc"


class Autoencoder(Lit):
    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, 2))
        self.decoder = nn.Sequential(nn.Tanh(), nn.Linear(2, 784), nn.Unflatten(1, (1, 28, 28)))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def training_step(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return nn.functional.mse_loss(self(x), x)


def test_online() -> None:
    loader = DataLoader(torch.randn(24, 1, 28, 28), batch_size=10)
    names = run_page(DOCS / "online.md", autoencoder=Autoencoder(), train_loader=loader, test_loader=loader)
    assert [tuple(p.mean.shape) for p in names["out"]] == [(10, 1, 28, 28), (10, 1, 28, 28), (4, 1, 28, 28)]
    assert all((p.epistemic > 0).all() for p in names["out"])
    assert names["online"].posterior.n_data == 24
    assert names["z"].latent_variance.shape == (8, 2)
    assert names["both"].variance.shape == (8, 1, 28, 28)
    assert (names["both"].latent_variance > 0).all()


def test_marginal_likelihood() -> None:
    names = run_page(DOCS / "marginal_likelihood.md", model=Model(), dm=Data())
    assert {"test_nll_map", "test_nll_marglik", "test_ece_marglik"} <= set(names["model"].tested)
    assert names["marglik"].posterior.prior_precision.shape == (2,)
    assert names["best"].monitor == names["stop"].monitor == "log_evidence_marglik"


def test_subnetworks() -> None:
    loader, model = Data().loader(), Patient()
    own = {"network": Patient().net, "train_loader": loader, "validation_loader": loader, "x": next(iter(loader))[0]}
    names = run_page(DOCS / "subnetworks.md", model=model, dm=Data(), **own)
    assert names["posterior"].subset.size == names["laplace"].posterior.subset.size == 100
    assert names["last"].subset.size == 20 * 3 + 3
    assert {f"test_nll_{of}" for of in ("map", "laplace", "swag")} <= set(model.tested)


def test_ivon() -> None:
    """In a Trainer and in a loop, for the same number of weights."""
    names = run_page(
        DOCS / "ivon.md",
        LitNet=Model,
        dm=Data(),
        network=mlp(4, 8, 3),
        loader=Data().loader(),
        dataset=Data().loader().dataset,
    )
    assert {"test_nll_map", "test_nll_ivon"} <= set(names["model"].tested)
    assert names["ivon"].posterior.subset.size == names["posterior"].subset.size == 4 * 8 + 8 + 8 * 3 + 3
    assert names["posterior"].n_data == names["ivon"].posterior.n_data


def test_swag() -> None:
    model = Patient()
    names = run_page(DOCS / "swag.md", model=model, dm=Data())
    assert {"test_nll_map", "test_nll_swag"} <= set(model.tested)
    assert names["swag"].posterior.subset.size == 4 * 20 + 20 + 20 * 3 + 3
    variances = [p.precision.inverse_diagonal() for p in (names["wider"], names["swag"].posterior)]
    torch.testing.assert_close(variances[0], 16 * variances[1])
    _, (schedule,) = names["configure_optimizers"](model)
    assert [round(schedule.lr_lambdas[0](epoch), 3) for epoch in (0, 6, 14, 15, 19)] == [1, 0.6, 0.1, 0.1, 0.1]


def test_priors() -> None:
    first, second = (DataLoader(classes(n), 4) for n in (10, 14))
    own = {"network": mlp(4, 5), "pretrained": mlp(4, 5), "train_loader": first, "x": torch.randn(24, 4)}
    names = run_page(DOCS / "priors.md", first_loader=first, second_loader=second, n_second=14, **own)
    H, P0 = names["both"].curvature.structure, names["old"].precision
    torch.testing.assert_close(names["both"].precision.diagonal(), H.diagonal() + P0.diagonal())
    assert names["posterior"].n_data == 24


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_lora() -> None:
    transformers = pytest.importorskip("transformers", reason="Hugging Face models are the extra `real`")
    pytest.importorskip("peft", reason="LoRA adapters are the extra `real`")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6}

    def make_base() -> Any:
        torch.manual_seed(0)
        return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=9, num_labels=3, **sizes))

    tokens, labels = torch.randint(1, 9, (8, 5)), torch.arange(8) % 3
    loader = DataLoader([{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)], 3)
    own = {"torch": torch, "make_base": make_base, "loader": loader, "x": {"input_ids": tokens}}
    names = run_page(DOCS / "lora.md", folder=Path("adapter").absolute(), **own)
    expected = names["laplace"].posterior.predict(own["x"]).probs
    torch.testing.assert_close(names["posterior"].predict(own["x"]).probs, expected)


@pytest.mark.filterwarnings("ignore:.*log σ.*")  # a run of one epoch is too short for it, and says so
@pytest.mark.parametrize(("page", "name"), [("variational_laplace.md", "vl"), ("variational_inference.md", "vi")])
def test_variational_modules(page: str, name: str, tmp_path: Path) -> None:
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, logger=False)
    net = run_page(DOCS / page, LitNet=Model, trainer=trainer, dm=Data())["net"]
    assert scores("map", name) <= set(net.tested)
    log_σ = torch.cat([l.flatten() for l in net.log_sigma.values()])
    torch.testing.assert_close(net.posterior.precision.diagonal(), (-2 * log_σ).exp())


def test_variational_last_layer(tmp_path: Path) -> None:
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, logger=False)
    dm = Data()
    names = run_page(
        DOCS / "variational_last_layer.md", LitNet=Model, trainer=trainer, dm=dm, x=next(iter(dm.loader()))[0]
    )
    assert scores("map", "vbll") <= set(names["net"].tested)
    _, covariance = names["posterior"].functional(names["x"])
    torch.testing.assert_close(covariance, torch.diag_embed(covariance.diagonal(dim1=1, dim2=2)))


def test_laplace() -> None:
    loader, model = Data().loader(), Model()
    own = {"network": nn.Linear(4, 3), "train_loader": loader, "val_loader": loader, "x": next(iter(loader))[0]}
    names = run_page(DOCS / "laplace.md", model=model, dm=Data(), **own)
    assert scores("map", "laplace") <= set(model.tested)
    assert [len(p) for p in names["out"]] == [10, 10, 4]
    shares = names["prediction"].epistemic + names["prediction"].aleatoric
    torch.testing.assert_close(shares, names["prediction"].probs * (1 - names["prediction"].probs))


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path")  # of a ModelCheckpoint, which no test needs
def test_checkpoints() -> None:
    dm = Data()
    dm.val_dataloader = dm.loader
    x = next(iter(dm.loader()))[0]
    names = run_page(DOCS / "checkpoints.md", model=Model(), dm=dm, LitNet=Model, x=x)
    expected = names["laplace"].posterior.predict(x).probs
    for posterior in (names["again"].posterior, names["at_best"], names["posterior"]):
        torch.testing.assert_close(posterior.predict(x).probs, expected)
    assert Path("posterior.pt").exists()
    assert not [value for value in names["state"].values() if type(value).__module__.startswith("lightning_bayes")]
    content = torch.load(names["best"].best_model_path, weights_only=True)
    assert any("LaplaceCallback" in key for key in content["callbacks"])


def test_distributed() -> None:
    trainer = run_page(DOCS / "distributed.md")["trainer"]
    assert (trainer.world_size, type(trainer.strategy).__name__) == (2, "DDPStrategy")


def test_from_laplace_torch() -> None:
    loader = Data().loader()
    x = next(iter(loader))[0]
    names = run_page(DOCS / "from_laplace_torch.md", model=nn.Linear(4, 3), train_loader=loader, x=x)
    torch.testing.assert_close(names["again"].predict(x, GLM(link="probit")).probs, names["probs"])


def test_the_right_column_of_laplace_torch_names_what_exists() -> None:
    """Words of the table are arguments of the calls that they belong to."""
    page = (DOCS / "from_laplace_torch.md").read_text(encoding="utf-8")
    right = " ".join(line.split("|")[2] for line in page.splitlines() if line.startswith("| `"))
    calls = (fit_laplace, LaplacePosterior.predict, GLM, Kron, Prior, Tuning)
    known = {word for call in calls for word in inspect.signature(call).parameters}
    known |= {"noise_std", "joint", "n"}
    assert set(re.findall(r"(\w+)=", right)) <= known
    for method in re.findall(r"posterior\.(\w+)\(", right):
        assert hasattr(LaplacePosterior, method)


def test_from_torch_uncertainty() -> None:
    x = torch.randn(12, 4)
    names = run_page(
        DOCS / "from_torch_uncertainty.md", module=(model := Model()), dm=Data(), known=x, unknown=10 + 3 * x
    )
    assert {"test_nll_map", "test_brier_laplace"} <= set(model.tested)
    assert set(names["ood"].compute()) == {"auroc", "aupr_in", "aupr_out", "fpr95"}


def test_tomography() -> None:
    names = run_page(DOCS / "tomography.md")
    assert names["image"].shape == names["variance"].shape == (1, 6, 6)
    assert names["images"].shape == (5, 1, 6, 6)
    assert (names["variance"] > 0).all()


def test_every_page_with_code_is_run_by_a_test() -> None:
    tests = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    pages = [page.name for page in DOCS.glob("*.md") if FENCE.search(page.read_text(encoding="utf-8"))]
    assert len(pages) > 20
    assert [name for name in pages if f'"{name}"' not in tests] == []


def test_an_error_points_at_the_page(tmp_path: Path) -> None:
    """The helper above does run the blocks: a wrong one fails, at its line of the page."""
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\nx = 1\n```\n\n```python\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as error:
        run_page(page)
    assert (str(error.traceback[-1].path), error.traceback[-1].lineno + 1) == (str(page), 8)
