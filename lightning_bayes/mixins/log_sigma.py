"""`log σ` of the weights, a mapping from the weight's dotted name to a parameter of its shape.

`nn.ParameterDict` would do but for the dots in its keys; in a state dict they are slashes here, as in
`log_sigma.net/0/weight`.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView

from torch import Tensor, nn


class LogSigma(nn.Module):
    """
    >>> import torch
    >>> log_sigma = LogSigma({"net.0.weight": torch.zeros(2, 3)})
    >>> log_sigma["net.0.weight"].shape, list(dict(log_sigma.named_parameters()))
    (torch.Size([2, 3]), ['net/0/weight'])
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._encoded = {name: encode(name) for name in values}
        for name, value in values.items():
            self.register_parameter(self._encoded[name], nn.Parameter(value))

    def __getitem__(self, name: str) -> nn.Parameter:
        if name not in self._encoded:
            raise KeyError(f"no log σ for {name!r}: it has no such parameter, or it is frozen or deterministic")
        found = self._parameters[self._encoded[name]]
        assert found is not None
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._encoded

    def __iter__(self) -> Iterator[str]:
        return iter(self._encoded)

    def __len__(self) -> int:
        return len(self._encoded)

    def keys(self) -> KeysView[str]:
        return self._encoded.keys()

    def values(self) -> ValuesView[nn.Parameter]:
        return self._as_dict().values()

    def items(self) -> ItemsView[str, nn.Parameter]:
        return self._as_dict().items()

    def _as_dict(self) -> dict[str, nn.Parameter]:
        return {name: self[name] for name in self._encoded}


def encode(name: str) -> str:
    """A name without dots. A parameter of the top module gets a slash before it, or one that is called `values` would
    be taken for the method.

    >>> encode("net.0.weight"), encode("values")
    ('net/0/weight', '/values')
    """
    return name.replace(".", "/") if "." in name else f"/{name}"
