"""The second device refuses what a GPU refuses, and computes what the CPU computes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

SAME = "same device"
REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sum": (lambda x: x + torch.ones(3), SAME),
    "product": (lambda x: x @ torch.ones(3, 2), SAME),
    "cat": (lambda x: torch.cat([x, torch.ones(4, 3)]), SAME),
    "in place on the CPU": (lambda x: torch.zeros(()).add_(x.sum()), SAME),
    "values to put": (lambda x: x.index_put((torch.tensor([0]),), torch.ones(3)), SAME),
    "index of a CPU tensor": (lambda x: torch.ones(4)[torch.zeros(1, device=x.device).long()], "indices"),
    "generator": (lambda x: x.clone().normal_(generator=torch.Generator()), "generator"),
    "new with generator": (lambda x: torch.randn(3, device=x.device, generator=torch.Generator()), "generator"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_gpu_refuses_is_refused(second: torch.device, case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(RuntimeError, match=message):
        call(torch.ones(4, 3, device=second))


def test_numbers_and_indices_of_the_cpu_are_allowed(second: torch.device) -> None:
    x = torch.arange(6.0).reshape(2, 3).to(second)
    assert torch.equal((x * torch.tensor(2.0))[torch.tensor([1])].cpu(), torch.tensor([[6.0, 8.0, 10.0]]))


def test_float64_is_refused(no_float64: torch.device) -> None:
    with pytest.raises(TypeError, match="no float64"):
        torch.ones(2, device=no_float64).double()
    assert torch.ones(2, device=no_float64).cpu().double().dtype == torch.float64


def test_tf32_rounds_matrix_products(tf32: torch.device) -> None:
    x = torch.randn(50, 50)
    error = ((x.to(tf32) @ x.to(tf32)).cpu() - x @ x).abs().max()
    assert 1e-4 < error / (x @ x).abs().max() < 1e-2


def test_a_network_has_the_same_outputs_and_gradients(second: torch.device) -> None:
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)]
    network, x = nn.Sequential(*layers), torch.randn(5, 1, 6, 6)
    results = []
    for device in (torch.device("cpu"), second):
        network.to(device).zero_grad()
        f = network(x.to(device))
        f.square().sum().backward()
        results.append([f.cpu(), *(p.grad.cpu() for p in network.parameters())])
    torch.testing.assert_close(*results)


def test_dropout_draws_from_the_devices_own_generator(second: torch.device) -> None:
    x = torch.ones(100, device=second)
    cpu_state = torch.get_rng_state()
    with torch.random.fork_rng(devices=[0], device_type=second.type):
        first = nn.functional.dropout(x)
    assert torch.equal(first, nn.functional.dropout(x))
    assert not torch.equal(first, nn.functional.dropout(x))
    assert torch.equal(torch.get_rng_state(), cpu_state)
