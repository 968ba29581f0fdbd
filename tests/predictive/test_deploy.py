"""`posterior.deploy`: the tensors of `predict`, from one module that can be exported."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.networks import Wired, made, mlp
from helpers.tensors import TIGHT, real
from torch import Tensor, nn

from lightning_bayes import GLM, HeteroscedasticGaussian, Kron, Prediction, fit_laplace
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.posterior import PosteriorError

X, NEW = real(30, 3, seed=1), 2 * real(7, 3, seed=2)
F = real(30, 4, seed=3)
TARGETS: dict[str, Tensor] = {
    "classification": F[:, :3].argmax(1),
    "binary": (F[:, 0] > 0).double(),
    "labels": (F[:, :3] > 0).double(),
    "regression": F[:, :2] + 3 * (F[:, 2:] > 1.5),  # some far away, for a Student-t
    "heteroscedastic": F[:, :2],
}
STRUCTURES = ("kron", "full", "diag", "ekfac", "lowrank")


def likelihood_of(task: str) -> str | Likelihood:
    known: dict[str, str | Likelihood] = {"labels": "binary", "heteroscedastic": HeteroscedasticGaussian()}
    return known.get(task, task)


def network(task: str) -> nn.Module:
    outputs = {"binary": 1, "regression": 2, "heteroscedastic": 4}.get(task, 3)
    net = made(lambda: mlp(3, 8, outputs))
    return nn.Sequential(net, nn.Flatten(0)) if task == "binary" else net


def batches(task: str) -> list[tuple[Tensor, Tensor]]:
    return [(X[part], TARGETS[task][part]) for part in (slice(0, 13), slice(13, 29), slice(29, 30))]


def posterior(task: str, structure: Any = "kron", subset: Any = "last_layer", **options: Any) -> Any:
    options = {"structure": structure, "subset": subset, **options}
    return fit_laplace(network(task), batches(task), likelihood_of(task), **options)


def assert_equal(out: dict[str, Tensor], expected: Prediction) -> None:
    for name, t in out.items():
        torch.testing.assert_close(t, getattr(expected, name), **TIGHT)
    assert ("probs" in out, "variance" in out) == (expected.probs is not None, expected.variance is not None)
    assert ("novelty_p" in out, "df" in out) == (expected.novelty_p is not None, expected.df is not None)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("task", TARGETS)
def test_a_last_layer_has_the_predictions_of_the_posterior(task: str, structure: str) -> None:
    fitted = posterior(task, structure, prior_precision=2.0)
    for n in (1, 7):
        assert_equal(fitted.deploy(X[:2])(NEW[:n]), fitted.predict(NEW[:n]))


@pytest.mark.parametrize("task", TARGETS)
def test_tuned_and_calibrated(task: str) -> None:
    held_out = [(x + 0.3, y) for x, y in batches(task)]
    tuned = posterior(task, "auto").tune_prior("auto", loader=held_out)
    out = tuned.deploy(X[:2])(NEW)
    assert "novelty_p" in out
    assert_equal(out, tuned.predict(NEW))
    raw = tuned.deploy(X[:2], calibrated=False)(NEW)
    assert_equal(raw, tuned.predict(NEW, calibrated=False))


def test_a_calibration_changes_what_is_deployed() -> None:
    fitted = posterior("classification")
    for of in ("outputs", "probs"):
        calibrated = fitted.calibrate(batches("classification"), GLM(link="probit"), of=of)
        assert_equal(calibrated.deploy(X[:2])(NEW), calibrated.predict(NEW))
        assert (calibrated.deploy(X[:2])(NEW)["probs"] - fitted.deploy(X[:2])(NEW)["probs"]).abs().max() > 0.01
    heavy = posterior("regression").tune_prior("auto", loader=batches("regression"))
    assert "df" in heavy.deploy(X[:2])(NEW)


def test_a_refined_posterior_has_its_own_mean() -> None:
    refined = posterior("regression", "full").refine(batches("regression"))
    assert refined.shift is not None
    assert (refined.predict(NEW).mean - refined.predict(NEW, "map").mean).abs().max() > 0.01
    assert_equal(refined.deploy(X[:2])(NEW), refined.predict(NEW))


@pytest.mark.parametrize("structure", [Kron(rank=2), "kron"])
def test_truncated_factors_and_unused_inputs(structure: Any) -> None:
    net = made(lambda: nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 3, bias=False)))
    with torch.no_grad():
        net[0].bias[:4] = -100.0  # units that are never active
    fitted = fit_laplace(net, batches("classification"), structure=structure, subset="last_layer")
    assert_equal(fitted.deploy(X[:2])(NEW), fitted.predict(NEW))


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_the_plain_network_with_temperature_and_novelty(subset: str) -> None:
    fitted = posterior("classification", subset=subset).calibrate(batches("classification"), "map")
    assert fitted.calibration_of("map").output_temperature != 1
    out = fitted.deploy(X[:2], "map")(NEW)
    torch.testing.assert_close(out["probs"], fitted.predict(NEW, "map").probs, **TIGHT)
    torch.testing.assert_close(out["novelty"], fitted.novelty(NEW), **TIGHT)
    torch.testing.assert_close(out["novelty_p"], fitted.predict(NEW).novelty_p, **TIGHT)


def test_novelty_of_a_layer_with_several_positions() -> None:
    net = made(lambda: Wired(lambda self, x: (self.head(x) + self.head(-x)).mT, head=nn.Linear(3, 4)))
    x, y = real(6, 5, 3, seed=4), torch.arange(30).view(6, 5) % 4
    fitted = fit_laplace(net, [(x, y)])
    out = fitted.deploy(x, "map")(x[:3] + 1)
    torch.testing.assert_close(out["novelty"], fitted.novelty(x[:3] + 1), **TIGHT)
    torch.testing.assert_close(out["probs"], fitted.predict(x[:3] + 1, "map").probs, **TIGHT)
    with pytest.raises(PosteriorError, match="does not return one row"):
        fitted.deploy(x, GLM(link="probit"))


def test_a_prior_that_leaves_the_plain_network_is_deployed_for_any_subset() -> None:
    plain = posterior("classification", subset="all").with_prior(2.0**41)
    assert_equal(plain.deploy(X[:2])(NEW), plain.predict(NEW))


def test_inputs_by_name_and_outputs_in_a_dict() -> None:
    net = made(
        lambda: Wired(
            lambda self, x, mask: {"logits": self.head((self.body(x) * mask).tanh())},
            body=nn.Linear(3, 6),
            head=nn.Linear(6, 3),
        )
    )
    mask = torch.ones(30, 6).double()
    loader = [({"x": X, "mask": mask}, TARGETS["classification"])]
    fitted = fit_laplace(net, loader, subset="last_layer")
    x = {"x": NEW, "mask": mask[:7]}
    assert_equal(fitted.deploy(x)(x), fitted.predict(x))


def test_the_users_network_is_copied_and_unchanged() -> None:
    net = network("classification").train()
    fitted = fit_laplace(net, batches("classification"), subset="last_layer")
    before = copy.deepcopy(net.state_dict())
    deployed = fitted.deploy(X[:2])
    with torch.no_grad():
        next(net.parameters()).zero_()
    assert net.training
    assert all(p.requires_grad for p in net.parameters())
    assert not any(p.requires_grad for p in deployed.parameters())
    assert not any(module.training for module in deployed.modules())
    assert not net[2]._forward_pre_hooks
    for name, t in before.items():
        torch.testing.assert_close(deployed.network.state_dict()[name], t, rtol=0, atol=0)


class Doubled(nn.Module):
    """A network that changes the outputs of its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.net(x)


def refusals() -> dict[str, tuple[Any, str]]:
    many, some = (made(lambda C=C: nn.Sequential(nn.Linear(3, C))) for C in (70, 30))
    to_many = [(X, torch.arange(30))]
    return {
        "all weights": (lambda: posterior("classification", subset="all").deploy(X[:2]), "fit subset='last_layer'"),
        "samples": (lambda: posterior("classification").deploy(X[:2], "bnn"), "use 'glm' for a last layer"),
        "draws": (lambda: posterior("classification").deploy(X[:2], GLM(link="mc")), "calibrate it with GLM"),
        "some": (lambda: fit_laplace(some, to_many).deploy(X[:2]), "calibrate it with GLM(link='probit')"),
        "many": (lambda: fit_laplace(many, to_many).deploy(X[:2]), "calibrate it with GLM(link='probit')"),
        "changed": (
            lambda: fit_laplace(made(Doubled), batches("classification"), subset="last_layer").deploy(X[:2]),
            "Doubled does not return",
        ),
        "another layer": (
            lambda: posterior("classification", subset=["0.weight", "0.bias"]).deploy(X[:2]),
            "Sequential does not return",
        ),
    }


@pytest.mark.parametrize("case", refusals())
def test_what_has_no_closed_form_raises_an_error_with_a_way_out(case: str) -> None:
    call, said = refusals()[case]
    with pytest.raises(PosteriorError) as error:
        call()
    assert said in str(error.value)
    assert "deploy(x, 'map')" in str(error.value)


def test_many_classes_have_the_closed_form_that_is_asked_for() -> None:
    net = made(lambda: nn.Sequential(nn.Linear(3, 70)))
    fitted = fit_laplace(net, [(X, torch.arange(30))])
    mean, covariance = fitted.functional(NEW)
    out = fitted.deploy(X[:2], GLM(link="probit"))(NEW)
    expected = fitted.likelihood.integrate(mean, covariance, "probit").mean
    torch.testing.assert_close(out["probs"], expected, **TIGHT)


ANY_NUMBER = {"x": {0: torch.export.Dim("batch")}}
ELSEWHERE = """
import sys
for name in ("lightning", "lightning_bayes", "torchmetrics", "pytorch_lightning"):
    sys.modules[name] = None  # importing it is an error
import torch
programs = [torch.export.load(path).module() for path in sys.argv[3:]]
xs = torch.load(sys.argv[1], weights_only=True)
torch.save([[program(x) for x in xs] for program in programs], sys.argv[2])
"""


def test_an_exported_program_runs_where_only_torch_is_installed(tmp_path: Path) -> None:
    posteriors = [
        posterior("classification").tune_prior("auto", loader=batches("classification")),
        posterior("regression", "full").tune_prior("auto", loader=batches("regression")),
    ]
    files = [str(tmp_path / name) for name in ("x.pt", "out.pt", "0.pt2", "1.pt2")]
    torch.save([NEW[:1], NEW], files[0])
    for fitted, path in zip(posteriors, files[2:], strict=True):
        program = torch.export.export(fitted.deploy(X[:2]), (X[:2],), dynamic_shapes=ANY_NUMBER, strict=False)
        torch.export.save(program, path)
    subprocess.run([sys.executable, "-c", ELSEWHERE, *files], check=True, timeout=120)
    for fitted, outs in zip(posteriors, torch.load(files[1], weights_only=True), strict=True):
        for n, out in zip((1, 7), outs, strict=True):
            assert_equal(out, fitted.predict(NEW[:n]))


@pytest.mark.slow
@pytest.mark.parametrize("task", TARGETS)
def test_onnx_has_the_same_numbers(task: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="exporting to ONNX takes onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="running ONNX takes onnxruntime")
    fitted = posterior(task).tune_prior("auto", loader=batches(task))
    deployed, path = fitted.deploy(X[:2]), str(tmp_path / "model.onnx")
    names = list(deployed(X[:2]))
    words = {"dynamic_shapes": ANY_NUMBER, "input_names": ["x"], "output_names": names}
    torch.onnx.export(deployed, (X[:2],), path, dynamo=True, **words)
    outs = runtime.InferenceSession(path).run(None, {"x": NEW.numpy()})
    expected = fitted.predict(NEW)
    for name, out in zip(names, outs, strict=True):
        torch.testing.assert_close(torch.as_tensor(out), getattr(expected, name), rtol=1e-5, atol=1e-6)
