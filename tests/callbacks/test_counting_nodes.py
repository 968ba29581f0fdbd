"""One graph whose nodes have targets: its examples are the labelled nodes, wherever examples are counted."""

import pytest

import lightning_bayes

pytest.importorskip("torch_geometric", reason="PyTorch Geometric is not installed: pip install torch_geometric")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the posterior does not improve the predictions"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
]

from helpers.graphs import LitNodes, with_masks  # noqa: E402
from torch_geometric.loader import DataLoader  # noqa: E402


def test_a_plain_network_is_tuned_on_nodes_that_are_held_out(caplog: pytest.LogCaptureFixture) -> None:
    module, data = LitNodes(), with_masks()
    posterior = lightning_bayes.fit(module.net, [data], [data], progress=False)
    assert "only 2 examples are held out" in caplog.text
    loader = DataLoader([data], batch_size=1)
    expected = lightning_bayes.fit(module, loader, loader, progress=False)
    assert posterior.n_data == expected.n_data == 5
    assert posterior.prior_precision == expected.prior_precision
    assert posterior.calibrations == expected.calibrations
