"""The statements of the five papers, and whether the measured runs confirm them.

The first table of `RESULTS.md` has a line for each statement. Its verdict follows from the claims in the sections of
the runs; only the remark, what experiments have shown about a statement that does not hold, is written here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from recipes.program import markdown

WITHIN = "within the error"
CLAIM = re.compile(r"^- (holds|does not hold): (.*)$", re.MULTILINE)
UNSURE = re.compile("within two standard errors|less than two standard errors")


@dataclass(frozen=True)
class Statement:
    """A statement of a paper, the claims of runs that test it (a pattern for each run), and a remark."""

    paper: str
    text: str
    claims: Mapping[str, str]
    remark: str = ""


GLM, VL, LAE, L2M = "GLM predictive", "Variational Laplace", "Laplacian autoencoders", "L2M"
TUTORIAL = "linearised Laplace (tutorial)"
OOD = ("lae/ood_mnist", "lae/ood_mnist_seed_1", "lae/ood_mnist_seed_2", "lae/ood_fashionmnist")


def _in_ood(pattern: str) -> dict[str, str]:
    return dict.fromkeys(OOD, pattern)


STATEMENTS = (
    Statement(
        GLM,
        "the GLM predictive has a better NLL than weight samples with the same posterior",
        {"glm/uci": "GLM has a better NLL than BNN with", "glm/images": ".*: GLM has a better NLL than BNN"},
    ),
    Statement(GLM, "… and at every prior precision (figure 5)", {"glm/uci": "GLM has a better NLL than BNN at every"}),
    Statement(
        GLM,
        "with or without refinement, it has a better NLL than mean-field VI",
        {"glm/uci": "GLM (refine d )?has a better NLL than MFVI"},
    ),
    Statement(GLM, "refined, it is better than MAP at every prior precision", {"glm/uci": "GLM refine has a better"}),
    Statement(
        GLM,
        "on images, it has a better accuracy and ECE than weight samples",
        {"glm/images": ".*: GLM has a better (accuracy|ECE) than BNN"},
    ),
    Statement(
        GLM,
        "on images, it has the best accuracy and OOD-AUC",
        {"glm/images": ".*: GLM has the best (accuracy|OOD-AUC)"},
        "as in the paper, each method has the network of its own best δ, so OOD-AUC compares different networks",
    ),
    Statement(GLM, "on images, the Gaussian process has the best ECE", {"glm/images": ".*: GP has the best ECE"}),
    Statement(
        GLM, "MAP is overconfident, weight samples are underconfident", {"glm/images": r".*: \w+ is \w+confident"}
    ),
    Statement(
        VL,
        "VL has the best NLL, accuracy and ECE",
        {"variational_laplace": "VL has the best"},
        "on FashionMNIST in all seeds; on CIFAR-10 networks of 38 % accuracy do not separate the methods",
    ),
    Statement(VL, "the order of methods is VL, VI, MAP", {"variational_laplace": "the order of methods"}),
    Statement(VL, "VL leads at the same β, for many values of β", {"variational_laplace": "for many values of β"}),
    Statement(
        VL,
        "without a multiplier of log σ's learning rate, training stops early; VL less so",
        {"variational_laplace": "β = 0.1: (with multiplier 1|VL stops less)"},
    ),
    Statement(VL, "the larger the multiplier, the higher the ELBO", {"variational_laplace": ".*the larger the"}),
    Statement(
        VL,
        "a larger multiplier makes VI's test NLL worse, but hardly VL's",
        {"variational_laplace": "β = 0.1: (from multiplier|the test NLL of VL)"},
    ),
    Statement(
        LAE,
        "the online autoencoder's σ tells unknown images from known ones",
        _in_ood(".* σ of the online LAE tells"),
        "holds for MNIST → KMNIST, not for FashionMNIST → MNIST: there, σ is not larger outside with equal variances "
        "of all weights either, and sixteen variations of the configuration do not change it",
    ),
    Statement(
        LAE,
        "its log-likelihood and typicality are the best scores",
        _in_ood("LAE \\(online\\) has the best (log-likelihood|typicality)"),
    ),
    Statement(
        LAE,
        "online and post-hoc autoencoders are better than VAE and dropout by σ",
        _in_ood("both LAE do so better"),
        "post-hoc σ is not larger outside (AUROC at most .5)",
    ),
    Statement(LAE, "with dropout, σ is larger for known images", _in_ood("with dropout output σ")),
    Statement(
        LAE,
        "the four AUROC are those of the authors' stored run, ± .02",
        dict.fromkeys(OOD[:3], "the online LAE's four AUROC"),
        "both σ are; the networks here saw 4,000 images instead of 55,000",
    ),
    Statement(
        LAE,
        "imputed images are calibrated, diverse and sharp",
        {"lae/imputation": ".*"},
        "they are too grey, as those of the VAE, and the ensemble is less calibrated than in the paper",
    ),
    Statement(L2M, "σ grows away from the data", {"l2m/toy": ".*higher beyond the data"}),
    Statement(L2M, "it is on par with other methods", {"l2m/toy": ".*below the median"}),
    Statement(
        L2M,
        "L2M improves on one network and on an ensemble (UCI)",
        {"l2m/ensembles": ".*"},
        "on boston, kin8nm and yacht; elsewhere the difference is at most .011",
    ),
    Statement(
        TUTORIAL,
        "priors by the evidence at θ⋆ are better than at the trained weights",
        {"evidence/full": ".*θ⋆ is (better|no worse) than θ̃", "evidence/kron": ".*θ⋆ is (better|no worse) than θ̃"},
    ),
    Statement(
        TUTORIAL,
        "at θ⋆, priors per layer are no worse than one",
        {"evidence/full": ".*at θ⋆ λ per", "evidence/kron": ".*at θ⋆ λ per"},
        "full matrices: with a prior for every layer in all five networks, with the paper's groups of normalised "
        "layers in none of three",
    ),
    Statement(
        TUTORIAL,
        "a subnetwork by SWAG variances is the best under rotation",
        {"subnetwork/rotated_mnist": ".*"},
        "as many random weights, and the last layer, are better here",
    ),
)


def statements_table(sections: Mapping[str, str], scales: Mapping[str, str]) -> str:
    """The table, from the text of each run's section and its scale. Statements without a measured run are left out."""
    rows = []
    for statement in STATEMENTS:
        counts = Counter(
            verdict for run, pattern in statement.claims.items() for verdict in verdicts(sections.get(run, ""), pattern)
        )
        if counts:
            runs = [run for run in statement.claims if run in sections]
            where = ", ".join(f"{run} ({scales[run]})" for run in runs[:1] + runs[1:][-1:])
            rows.append([statement.paper, statement.text, said(counts), where, statement.remark])
    return markdown(["paper", "statement", "verdict", "runs (scale)", "what is known"], rows) if rows else ""


def verdicts(section: str, pattern: str) -> list[str]:
    """The verdicts on the claims of a section that begin with a pattern."""
    found = []
    for holds, claim in CLAIM.findall(section):
        if re.match(pattern, claim):
            found.append(WITHIN if UNSURE.search(claim) else holds)
    return found


def said(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    if len(counts) == 1:
        (verdict,) = counts
        return verdict if total == 1 else f"{verdict} ({total} of {total})"
    return ", ".join(
        f"{verdict} {counts[verdict]}" for verdict in ("holds", WITHIN, "does not hold") if verdict in counts
    )
