"""Where a callback finds the network in a module, and the data of its fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_bayes.arguments import count, format_value, integer, text
from lightning_bayes.options.plain import from_mapping


@dataclass(frozen=True)
class Network:
    """The network `x ↦ f(x)` in a LightningModule.

    Args:
        name: the dotted name of the submodule; by default the module's own `forward`.
        output: the key, attribute or index of f in what the network returns; by default a tensor, or its `logits`.
        class_dim: the dimension of f that counts classes; by default the shape of the targets decides.
    """

    name: str | None = None
    output: str | int | None = None
    class_dim: int | None = None

    def __post_init__(self) -> None:
        if self.name is not None:
            text("network", self.name, "the dotted name of a submodule")
        if self.output is not None and (isinstance(self.output, bool) or not isinstance(self.output, (str, int))):
            raise ValueError(f"output must be a key, an attribute's name or an index, got {format_value(self.output)}")
        if self.output == "":
            raise ValueError("output must name an entry of what the network returns, got an empty string")
        if self.class_dim is not None and integer("class_dim", self.class_dim) == 0:
            raise ValueError("class_dim=0 is the dimension of the examples: use 1, or -1 for the last")


@dataclass(frozen=True, eq=False)
class FitData:
    """The data of a fit after training.

    Args:
        loader: a DataLoader, or the name of a method or attribute of the data module or module, used instead of the
            training data, for example the same examples without augmentation.
        max_batches: end the pass after this many batches. By default it takes all data that training draws from, also
            with `limit_train_batches`. Data without a length that training has not exhausted are read for as many
            batches as an epoch took.
    """

    loader: Any = None
    max_batches: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.loader, str):
            text("data", self.loader, "a loader, or the name of a method that returns one")
        if self.max_batches is not None:
            count("max_batches", self.max_batches)


def network_option(network: Any) -> Network:
    """The option that `network=` means."""
    if isinstance(network, Network):
        return network
    if isinstance(network, Mapping):
        return from_mapping("network", network, Network)
    return Network(name=network)


def output_option(output: Any) -> Network:
    """The option that `output=` of a function means, which is given the network itself."""
    if not isinstance(output, Network):
        return Network(output=output)
    if output.name is not None:
        raise ValueError(f"output= reads the network that is passed: pass the submodule {output.name!r} itself")
    return output


def data_option(data: Any) -> FitData:
    """The option that `data=` means. A dictionary with other keys is a loader of Lightning's."""
    if isinstance(data, FitData):
        return data
    if isinstance(data, Mapping) and set(data) <= {"loader", "max_batches"}:
        return from_mapping("data", data, FitData)
    return FitData(data)
