"""Random networks against brute force: one example at a time, in float64, in batches of several sizes and lengths.

Hooks that spoil gradients must not matter to any of it, nor the batch to any field of a prediction.

`make test-slow` draws new networks in every run; set LIGHTNING_BAYES_SEED to the seed that a failure prints.
"""

import os
import time
from collections.abc import Callable

import numpy as np
import oracles
import pytest
import torch
from adversary import BLOCKS, FRONTS, LIKELIHOODS, POOLINGS, draw, hooked
from helpers.options import predictive_of
from helpers.tensors import seeded
from torch import Tensor

from lightning_bayes import DeepEnsemble, Kron, Prediction, fit_laplace
from lightning_bayes.curvature import choose_subset, fit_curvature
from lightning_bayes.curvature.diagonal import BatchDiagonal
from lightning_bayes.structures import Kronecker

TIGHT = {"rtol": 1e-7, "atol": 1e-9}
SEED = int(os.environ.get("LIGHTNING_BAYES_SEED", time.time_ns() % 10**9))
KNOWN = [4, 18, 32, 5011, 5020, 5025, 5058, 9130]  # for the default suite


def same_but_for_rounding(found: Tensor, exact: Tensor) -> None:
    """Entries of a PSD matrix are rounded at the size of `√(M_ii M_jj)`, which the gradients at a zero input of an RMS
    norm, 1/√eps, can make many times their own."""
    scale = exact.diagonal().sqrt()
    torch.testing.assert_close(found.diagonal(), exact.diagonal(), **TIGHT)
    assert ((found - exact).abs() <= 1e-9 + 1e-7 * scale.outer(scale)).all()


def attack(seed: int) -> None:
    drawn = draw(seed)
    print(f"seed {seed}: {drawn.kind}")
    network, cases = drawn.network, drawn.batches
    likelihood = cases[0].likelihood
    batches = [(case.x, case.y) for case in cases]
    singles = [(x[n : n + 1], y[n : n + 1]) for x, y in batches for n in range(len(y))]
    exact = {
        "ggn": sum(oracles.ggn(case) for case in cases),
        "empirical_fisher": sum(oracles.empirical_fisher(case)[0] for case in cases),
        # Labels belong to the number of an example, so that batches of one draw the same.
        "fisher_mc": fit_curvature(network, singles, likelihood, "full", curvature="fisher_mc").structure.to_dense(),
    }
    for curvature, H in exact.items():
        full = fit_curvature(network, batches, likelihood, "full", curvature=curvature).structure
        torch.testing.assert_close(full.to_dense(), H, **TIGHT)
        diagonal = fit_curvature(network, batches, likelihood, "diag", curvature=curvature).structure
        torch.testing.assert_close(diagonal.diagonal(), H.diagonal(), **TIGHT)
        for sharing in ("expand", "reduce"):
            found, alone = (
                fit_curvature(
                    network,
                    loader,
                    likelihood,
                    curvature=curvature,
                    probe=batches[0][0],
                    structure=Kron(weight_sharing=sharing),
                ).structure
                for loader in (batches, singles)
            )
            # Inputs of unique tokens are those of a batch; of routed rows that reach no output, nothing says whose
            # mean input they belong to.
            unowned = sharing == "reduce" and "experts" in drawn.kind and "mean" not in drawn.kind
            if not drawn.kind.startswith("unique_tokens") and not unowned:
                same_but_for_rounding(found.to_dense(), alone.to_dense())
            for part, layout in zip(found.blocks, found.layouts, strict=True):
                if not isinstance(part, Kronecker):
                    places = layout.gather(torch.arange(len(H)))
                    torch.testing.assert_close(part.to_dense(), H[places][:, places], **TIGHT)

    online = BatchDiagonal(network, choose_subset(network, cases[0].x, "all"), likelihood, "exact")
    torch.testing.assert_close(sum(online(x, y) for x, y in batches), exact["ggn"].diagonal(), **TIGHT)

    parameters = dict(network.named_parameters())
    for structure in ("full", "diag", "kron"):
        posterior = fit_laplace(network, batches, likelihood, structure=structure)
        P = posterior.precision.to_dense()
        rounding = torch.finfo(P.dtype).eps * float(torch.linalg.cond(P))  # of a solution, by that of P alone
        tight = {**TIGHT, "rtol": max(TIGHT["rtol"], rounding)}
        for x, y in batches:
            J = torch.cat([oracles.jacobian(network, x[n : n + 1], parameters)[1] for n in range(len(y))])
            joint = J @ torch.linalg.solve(P, J.mT)
            torch.testing.assert_close(posterior.functional(x, joint=True)[1], joint, **tight)
            C = len(J) // len(y)
            covariances = torch.stack([joint[n * C : n * C + C, n * C : n * C + C] for n in range(len(y))])
            torch.testing.assert_close(posterior.functional(x)[1], covariances, **tight)
            with hooked(network):
                again = fit_laplace(network, batches, likelihood, structure=structure)
                torch.testing.assert_close(again.functional(x)[1], covariances, **tight)
    for words in [*(("glm", link) for link in likelihood.links), ("bnn", None), ("map", None)]:
        one_value(lambda x, words=words: posterior.predict(x, predictive_of(*words, 10), generator=seeded()), batches)
    members = DeepEnsemble([posterior, posterior.with_prior(3.0)])
    one_value(lambda x: members.predict(x, generator=seeded()), batches)


def one_value(predict: Callable[[Tensor], Prediction], batches: list[tuple[Tensor, Tensor]]) -> None:
    """Every field of every example is the same alone, and in a batch of any order."""
    for x, _ in batches:
        whole = predict(x)
        alone, reverse = Prediction.cat([predict(x[n : n + 1]) for n in range(len(x))]), predict(x.flip(0))[::-1]
        for name, values in whole.numpy().items():
            for other in (alone, reverse):
                np.testing.assert_allclose(other.numpy()[name], values, rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("seed", KNOWN)
def test_known_networks_are_exact(seed: int) -> None:
    attack(seed)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(150))
def test_new_networks_are_exact(number: int) -> None:
    attack(SEED + number)


def test_there_are_many_kinds() -> None:
    assert len(BLOCKS) >= 45
    assert len(BLOCKS) * len(FRONTS) * len(POOLINGS) * len(LIKELIHOODS) >= 2000
