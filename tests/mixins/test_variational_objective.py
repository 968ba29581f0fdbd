"""The Variational Laplace loss and all its gradients equal the paper's formula, written out weight by weight."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from variational_cases import (
    LIKELIHOODS,
    NOISE,
    VL,
    draw,
    gradients,
    images,
    loader,
    naive_objective,
    options,
    spread,
    targets,
    trainer,
    vl,
)

from lightning_bayes.mixins import variational_laplace
from lightning_bayes.mixins.gaussian_weights import kl_divergence, kl_with_gradients
from lightning_bayes.mixins.variational_laplace import draw_labels, squared_gradient

TASKS = list(LIKELIHOODS)
CASES = [
    *((kind, task, False) for kind in ("mlp", "residual") for task in TASKS),
    ("conv", "classification", False),
    ("residual", "classification", True),
    ("tied", "regression", False),
    ("frozen", "binary", False),
]


def sampled_labels(task: str, n: int) -> Tensor:
    return targets(task, n, seed=77)


def same(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float, of: str = "") -> None:
    """Each parameter's gradient, up to `rtol` of the largest."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=rtol * max(scale, 1e-12), msg=lambda m, n=name: f"{of}{n}: {m}"
        )


def test_kl_divergence_is_that_of_two_gaussians() -> None:
    μ, log_σ, s = draw(3, 4, seed=1), draw(3, 4, seed=2), 0.7
    q = torch.distributions.Normal(μ, log_σ.exp())
    p = torch.distributions.Normal(torch.zeros_like(μ), torch.full_like(μ, s))
    torch.testing.assert_close(kl_divergence(μ, log_σ, s), torch.distributions.kl_divergence(q, p).sum())
    torch.testing.assert_close(kl_divergence(torch.zeros(5), torch.full((5,), s).log(), s), torch.zeros(()))


def test_kl_with_gradients_is_the_same_without_a_graph() -> None:
    """Of several tensors, each with its own prior; the gradients times the weight of the KL divergence."""
    shapes, s = ((3, 4), (5,), (1,)), (0.7, 1.3, 2.0)
    μ, log_σ = ([draw(*shape, seed=seed).requires_grad_() for shape in shapes] for seed in (1, 2))
    expected = torch.stack([kl_divergence(*each) for each in zip(μ, log_σ, s, strict=True)]).sum()
    found, of_μ, of_log_σ = kl_with_gradients([t.detach() for t in μ], [t.detach() for t in log_σ], s, weight=0.1)
    torch.testing.assert_close(found, expected.detach())
    gradients = torch.autograd.grad(0.1 * expected, [*μ, *log_σ])
    torch.testing.assert_close(torch.cat([of_μ, of_log_σ]), torch.cat([g.flatten() for g in gradients]))


def test_squared_gradient_weighs_by_variance_and_batch() -> None:
    g, log_σ = [draw(2, 3, seed=1), draw(4, seed=2)], [draw(2, 3, seed=3), draw(4, seed=4)]
    expected = 7 / 2 * sum((l.exp() ** 2 * t**2).sum() for t, l in zip(g, log_σ, strict=True))
    torch.testing.assert_close(squared_gradient(g, log_σ, S=7), expected)


@pytest.mark.parametrize(("kind", "task", "eval_mode"), CASES)
@pytest.mark.parametrize("n", [1, 5])
def test_vl_loss_and_its_gradients_are_the_papers(kind: str, task: str, eval_mode: bool, n: int) -> None:
    module = vl(kind, task, eval_mode)
    if eval_mode:
        module.net.eval()
    x, y, ỹ = images(n), targets(task, n), sampled_labels(task, n)
    expected = naive_objective(module, x, y, ỹ, β=0.7, N=11, s=0.8)
    loss = module.vl_loss(module(x), y, ỹ)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    same(gradients(module, loss), gradients(module, expected), rtol=1e-10)


@pytest.mark.parametrize(("kind", "task", "eval_mode"), CASES)
def test_gradients_are_those_of_the_losss_own_differences(kind: str, task: str, eval_mode: bool) -> None:
    """No second derivative of autograd's is taken on trust: move each weight a little and look at the loss."""
    module = vl(kind, task, eval_mode)
    x, y, ỹ = images(4), targets(task, 4), sampled_labels(task, 4)

    def loss() -> Tensor:
        if eval_mode:
            module.net.eval()
        return module.vl_loss(module(x), y, ỹ)

    found, h = gradients(module, loss()), 1e-5
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        for place in range(0, p.numel(), max(1, p.numel() // 4)):
            flat, both = p.data.view(-1), []
            for sign in (1, -1):
                flat[place] += sign * h
                both.append(loss().item())
                flat[place] -= sign * h
            assert (both[0] - both[1]) / (2 * h) == pytest.approx(
                found[name].view(-1)[place].item(), rel=1e-5, abs=1e-8
            )


@pytest.mark.parametrize(("kind", "task", "eval_mode"), CASES)
@pytest.mark.parametrize("method", ["exact", "finite_difference", "two_passes"])
def test_the_users_step_is_trained_on_the_same_loss(
    kind: str, task: str, eval_mode: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = vl(kind, task, eval_mode, method=method)
    x, y = images(5), targets(task, 5)
    seen: list[Tensor] = []

    def spy(*args: Any) -> Tensor:
        seen.append(draw_labels(*args))
        return seen[-1]

    monkeypatch.setattr(variational_laplace, "draw_labels", spy)
    loss = module.training_step((x, y), 0)
    found = gradients(module, loss)
    expected = naive_objective(module, x, y, seen[0], β=0.7, N=11, s=0.8)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    same(found, gradients(module, expected), rtol=1e-10 if method == "exact" else 1e-5)


@pytest.mark.parametrize("curvature", ["fisher", "empirical"])
def test_all_methods_agree_through_the_trainer(curvature: str, tmp_path: Any) -> None:
    """With accumulation, clipping and batch norm: the same weights after two epochs."""
    ends = []
    for method in ("exact", "finite_difference", "two_passes"):
        module = spread(VL("residual", variational=options(method=method, estimator=curvature)), centre=-2)
        fit = trainer(tmp_path, accumulate_grad_batches=2, gradient_clip_val=0.5)
        fit.fit(module, loader(n=11))
        ends.append({name: t.clone() for name, t in module.state_dict().items()})
    for name, value in ends[0].items():
        for end in ends[1:]:
            torch.testing.assert_close(end[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_labels_come_from_the_model(task: str) -> None:
    """Their mean is the model's, over many examples; each draw is a new one."""
    module, n = vl("mlp", task), 4000
    f = module(images(3)).detach()
    many = f.repeat_interleave(n, 0)
    labels, others = (draw_labels(module._variational, many, targets(task, 3 * n)) for _ in range(2))
    if task == "classification":
        labels, others, expected = F.one_hot(labels, 3).double(), F.one_hot(others, 3).double(), f.softmax(1)
    else:
        expected = f.sigmoid() if task == "binary" else f
    for drawn in (labels, others):
        torch.testing.assert_close(drawn.unflatten(0, (3, n)).mean(1), expected, rtol=0, atol=0.05)
    assert (labels != others).any()
    if task == "regression":
        torch.testing.assert_close((labels - many).std(), torch.tensor(NOISE).double(), rtol=0.03, atol=0)


def test_labels_leave_the_global_random_state_alone() -> None:
    module = vl()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    module.training_step((images(4), targets("classification", 4)), 0)
    assert torch.equal(torch.get_rng_state(), before)
