"""Which inputs have a row per example is found in few runs, and kinds of inputs are those that are registered."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bayes.network import inputs
from lightning_bayes.network.inputs import Container, ValueContainer


class Several(nn.Module):
    """The output of an example depends on its rows of the batched inputs and on all rows of the shared ones."""

    def __init__(self, shared: set[int]) -> None:
        super().__init__()
        self.head, self.shared, self.runs = nn.Linear(3, 2).double(), shared, 0

    def forward(self, *parts: Tensor) -> Tensor:
        self.runs += 1
        together = sum(part.sin().sum() for i, part in enumerate(parts) if i in self.shared)
        rows = [part for i, part in enumerate(parts) if i not in self.shared]
        return self.head(torch.stack(rows).prod(0) + together)


def parts(n: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(4, 3, dtype=torch.float64) for _ in range(n))


@pytest.mark.parametrize("shared", [set(), {1}, {2}, {3}, {1, 2, 3}], ids=str)
def test_shared_inputs_with_as_many_rows_as_examples_are_found(shared: set[int]) -> None:
    network, x = Several(shared), parts(4)
    assert inputs.batched(network, x) == [i not in shared for i in range(4)]
    taken = inputs.take(network, x, [2])
    torch.testing.assert_close(network(*taken), network(*x)[2:3])


def test_the_number_of_runs_grows_with_the_number_of_inputs() -> None:
    network = Several(set(range(8)) - {7})  # the first input is shared: no example can be taken out
    assert not any(inputs.batched(network, parts(8)))
    assert network.runs <= 8 + 2
    inputs.batched(network, parts(8))
    assert network.runs <= 8 + 2  # known for this form of input


def test_a_registered_container_is_asked() -> None:
    before = list(inputs.CONTAINERS)

    class Words(ValueContainer):
        @staticmethod
        def holds(x: Any) -> bool:
            return isinstance(x, str)

        @property
        def size(self) -> int:
            return len(self.value.split())

        def take(self, examples: list[int]) -> Container:
            words = self.value.split()
            return Words(" ".join(words[n] for n in examples))

        def map(self, change: Any) -> ValueContainer:
            return self

    try:
        x = inputs.contained(nn.Linear(1, 1), "one two three")
        assert inputs.batch_size(x) == 3
        assert inputs.take(nn.Linear(1, 1), x, slice(1, 3)).value == "two three"
    finally:
        inputs.CONTAINERS[:] = before
    assert inputs.contained(nn.Linear(1, 1), "one two three") == "one two three"
