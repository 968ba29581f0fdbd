"""Arguments that would give a number without a meaning are refused, in one sentence."""

import pytest
import torch
from posterior_cases import Case, case
from torch import nn

from lightning_bayes import Bernoulli, LaplacePosterior, fit_laplace
from lightning_bayes.likelihoods import LikelihoodError
from lightning_bayes.network import DataError
from lightning_bayes.predictive.evaluate import evaluate

IGNORED = torch.full((7,), -100)


@pytest.fixture(name="problem")
def make_problem() -> Case:
    return case("mlp")


@pytest.fixture
def posterior(problem: Case) -> LaplacePosterior:
    return fit_laplace(problem.network, problem.loader(), problem.likelihood, structure="diag")


def test_data_without_a_single_target_are_no_data(problem: Case, posterior: LaplacePosterior) -> None:
    batches = [(problem.x[:4], IGNORED[:4]), (problem.x[4:], IGNORED[4:])]
    with pytest.raises(DataError, match=r"all targets are equal to ignore_index"):
        fit_laplace(problem.network, batches)
    with pytest.raises(ValueError, match=r"no held-out targets: all are marked as unknown"):
        posterior.tune_prior("grid", batches)
    with pytest.raises(DataError, match=r"all targets are marked as unknown .* evaluate needs at least one"):
        evaluate(posterior, batches)
    some = fit_laplace(problem.network, [batches[0], (problem.x[4:], problem.y[4:])], structure="diag")
    rest = fit_laplace(problem.network, [(problem.x[4:], problem.y[4:])], structure="diag")
    torch.testing.assert_close(some.precision.to_dense(), rest.precision.to_dense())


def test_targets_of_another_kind_are_not_scored(problem: Case, posterior: LaplacePosterior) -> None:
    one_hot = nn.functional.one_hot(problem.y, 3)
    for use in (lambda loader: evaluate(posterior, loader), lambda loader: posterior.tune_prior("grid", loader)):
        with pytest.raises(LikelihoodError, match=r"targets of shape \[7\] .* y\.argmax\(1\) for one-hot targets"):
            use([(problem.x, one_hot)])
        with pytest.raises(LikelihoodError, match="got the target 7, but the network has 3 outputs"):
            use([(problem.x, problem.y + 7 * (problem.y == 0))])
    binary = fit_laplace(problem.network, [(problem.x, one_hot.double())], Bernoulli(), structure="diag")
    for use in (lambda loader: evaluate(binary, loader), lambda loader: binary.tune_prior("grid", loader)):
        with pytest.raises(LikelihoodError, match="needs targets that are 0 or 1, got 5"):
            use([(problem.x, 5 * one_hot)])


def test_log_prob_takes_whole_weight_vectors(posterior: LaplacePosterior) -> None:
    for theta in (torch.tensor(1.0), torch.ones(1), posterior.mean[:-1], posterior.mean.unsqueeze(1)):
        with pytest.raises(ValueError, match=r"theta must be weight vectors \[\.\.\., 31\]"):
            posterior.log_prob(theta)
    assert posterior.log_prob(posterior.mean.expand(2, 3, -1)).shape == (2, 3)
