"""One graph whose nodes have targets: its examples are the labelled nodes."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from helpers.training import trainer

import lightning_bayes
from lightning_bayes import (
    L2MCallback,
    MarginalLikelihoodCallback,
    OnlineLaplaceCallback,
    SWAGCallback,
    VariationalInferenceMixin,
    VariationalLaplaceMixin,
)
from lightning_bayes.network.messages import BayesWarning
from lightning_bayes.posterior.gaussian import PosteriorError

pytest.importorskip("torch_geometric", reason="PyTorch Geometric is not installed: pip install torch_geometric")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
]

from helpers.graphs import LitNodes, with_masks  # noqa: E402
from torch_geometric.loader import DataLoader  # noqa: E402


def test_a_plain_network_is_tuned_on_nodes_that_are_held_out() -> None:
    module, data = LitNodes(), with_masks()
    with pytest.warns(BayesWarning, match="only 2 examples are held out"):
        posterior = lightning_bayes.fit(module.net, [data], [data], progress=False)
    loader = DataLoader([data], batch_size=1)
    expected = lightning_bayes.fit(module, loader, loader, progress=False)
    assert posterior.n_data == expected.n_data == 5
    assert posterior.prior_precision == expected.prior_precision
    assert posterior.calibrations == expected.calibrations


def trained(folder: Path, callback: Any, module: L.LightningModule, graphs: list[Any], **words: Any) -> int:
    size = words.pop("batch_size", 1)
    run = trainer(folder, *([] if callback is None else [callback]), max_epochs=2, precision="64-true", **words)
    run.fit(module, DataLoader(graphs, batch_size=size))
    holder: Any = module if callback is None else callback
    return holder.posterior.n_data


CALLBACKS = {
    "online": lambda: OnlineLaplaceCallback("classification"),
    "swag": lambda: SWAGCallback(start=0),
    "marginal likelihood": lambda: MarginalLikelihoodCallback(progress=False),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_count_labelled_nodes(name: str, tmp_path: Path) -> None:
    assert trained(tmp_path, CALLBACKS[name](), LitNodes(), [with_masks()]) == 5


class ByVI(VariationalInferenceMixin, LitNodes):
    pass


class ByVL(VariationalLaplaceMixin, LitNodes):
    pass


@pytest.mark.parametrize("kind", [ByVI, ByVL])
def test_mixins_count_labelled_nodes(kind: Any, tmp_path: Path) -> None:
    module = kind(variational={"likelihood": "classification", "prior_std": 1.0})
    assert trained(tmp_path, None, module, [with_masks()]) == 5


def test_those_of_several_graphs_within_the_limit(tmp_path: Path) -> None:
    graphs = [with_masks(seed) for seed in range(4)]
    assert trained(tmp_path, CALLBACKS["online"](), LitNodes(), graphs, batch_size=2) == 20
    assert trained(tmp_path, CALLBACKS["online"](), LitNodes(), graphs, batch_size=2, limit_train_batches=1) == 10


def test_l2m_says_after_one_step_that_a_batch_holds_all_nodes(tmp_path: Path) -> None:
    module = LitNodes()
    with pytest.raises(PosteriorError, match="a batch of all 5 examples"):
        trained(tmp_path, L2MCallback(prior_precision=1.0), module, [with_masks()])
    assert module.trainer.global_step == 1
    assert (
        trained(tmp_path, L2MCallback(prior_precision=1.0), LitNodes(), [with_masks(seed) for seed in range(3)]) == 15
    )
