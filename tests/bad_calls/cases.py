"""What the tables share: a row, a table of them, and a few small fitted posteriors to call."""

import linecache
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

import lightning_bayes
from lightning_bayes import Bernoulli, Gaussian, Kron, LaplacePosterior, Network, fit_laplace

PACKAGE = str(Path(lightning_bayes.__file__).parent)
LONGEST = 400  # characters of a message
KINDS = (ValueError, TypeError, RuntimeError)  # and with them all of the package's own


@dataclass(frozen=True)
class Row:
    """A call that cannot work, and what its message has to say."""

    of: str  # what is called
    argument: str
    given: str
    call: Callable[["Things"], Any]
    words: tuple[str, ...]
    error: type[Exception] | tuple[type[Exception], ...] = KINDS

    def __str__(self) -> str:
        return f"{self.of}({self.argument}={self.given})"


@dataclass(frozen=True)
class Of:
    """A value that is made of the shared things."""

    make: Callable[["Things"], Any]
    shown: str


class Table:
    """The rows of one thing that is called: `table("samples", 0, "words", …)` adds one.

    Args:
        of: its public name.
        make: the call; it gets the shared things, and the bad argument by its name.
        signature: what has the arguments' names, if not `of` itself.
        named: whether every message has the argument's name in it.
    """

    def __init__(
        self, of: str, make: Callable[..., Any], signature: Any = None, named: bool = True, error: Any = KINDS
    ) -> None:
        self.of, self.signature, self.named, self.error = of, signature, named, error
        self.rows: list[Row] = []
        self.anything: dict[str, str] = {}
        self._make = make

    def __call__(
        self, argument: str, value: Any, *words: str, error: Any = None, named: bool | str | None = None, **others: Any
    ) -> None:
        make = self._make

        def call(things: "Things") -> Any:
            given = {argument: value, **others}
            return make(things, **{key: v.make(things) if isinstance(v, Of) else v for key, v in given.items()})

        needs_name = self.named if named is None else named
        name = needs_name if isinstance(needs_name, str) else argument  # of the field at fault in an option object
        also = "".join(f", {key}={_shown(v)}" for key, v in others.items())
        needed = (name, *words) if needs_name else words
        error = self.error if error is None else error
        self.rows.append(Row(self.of, argument, _shown(value) + also, call, needed, error))

    def anything_goes(self, argument: str, reason: str) -> None:
        """Of this argument every value works."""
        self.anything[argument] = reason


def _shown(value: Any) -> str:
    if isinstance(value, Of):
        return value.shown
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    return " ".join(getattr(value, "__name__", repr(value)).split())[:40]


def clearness(row: Row, things: "Things") -> str:
    """Nothing where the call ends in a clear sentence, or what is wrong with what it ends in."""
    try:
        row.call(things)
    except BaseException as error:
        return _unclear(row, error)
    return "accepted"


def _unclear(row: Row, error: BaseException) -> str:
    text = str(error)
    said = f": {type(error).__name__}: {text[:300]}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    if not frame.filename.startswith(PACKAGE) or not line.startswith("raise "):
        return f"not ours ({Path(frame.filename).name}:{frame.lineno}){said}"
    if not isinstance(error, row.error):
        return f"another kind{said}"
    if "\n" in text or len(text) > LONGEST:
        return f"too long{said}"
    missing = [word for word in row.words if word not in text]
    return f"without {missing}{said}" if missing else ""


def mlp(inputs: int = 3, outputs: int = 3) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs))


class LitNet(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(3, 2), mlp(2, 3)

    def forward(self, x: Tensor) -> Any:
        return self.decoder(self.encoder(x))


@dataclass
class Things:
    """Fitted once for all rows; what a row makes for itself it hands to `watch`."""

    folder: Path
    x: Tensor = field(default_factory=lambda: torch.linspace(-1, 1, 15).reshape(5, 3))
    y: Tensor = field(default_factory=lambda: torch.tensor([0, 1, 2, 0, 1]))
    r: Tensor = field(default_factory=lambda: torch.linspace(-1, 1, 10).reshape(5, 2))
    _watched: list[tuple[nn.Module, Any]] = field(default_factory=list)

    def watch(self, network: Any) -> Any:
        """The network, which the call must leave as it is now."""
        self._watched.append((network, _state(network)))
        return network

    def check_untouched(self) -> None:
        for network, before in self._watched:
            now = _state(network)
            assert now.keys() == before.keys()
            for name, value in before.items():
                assert _same(value, now[name]), f"{type(network).__name__}: {name} has changed"

    def forget(self) -> None:
        """The networks of one row; those of the posteriors stay."""
        fitted = (self.classifier, self.diagonal, self.damped, self.regressor, self.binary, self.autoencoder)
        shared = {id(posterior.network) for posterior in fitted}
        self._watched = [(network, state) for network, state in self._watched if id(network) in shared]

    def net(self, outputs: int = 3) -> nn.Sequential:
        network: nn.Sequential = self.watch(mlp(3, outputs))
        return network

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.x, self.y)]

    @property
    def real_batches(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.x, self.r)]

    @cached_property
    def classifier(self) -> LaplacePosterior:
        return fit_laplace(self.net(), self.batches)

    @cached_property
    def diagonal(self) -> LaplacePosterior:
        return fit_laplace(self.net(), self.batches, structure="diag")

    @cached_property
    def damped(self) -> LaplacePosterior:
        return fit_laplace(self.net(), self.batches, structure=Kron(damping="glm"))

    @cached_property
    def regressor(self) -> LaplacePosterior:
        return fit_laplace(self.net(2), self.real_batches, Gaussian(0.3))

    @cached_property
    def binary(self) -> LaplacePosterior:
        return fit_laplace(self.net(1), [(self.x, (self.y > 0).float()[:, None])], Bernoulli())

    @cached_property
    def autoencoder(self) -> LaplacePosterior:
        return fit_laplace(self.watch(Autoencoder()), [(self.x, self.x)], "regression", structure="diag")

    def moved(self, change: Callable[[nn.Module], Any]) -> LaplacePosterior:
        """A posterior whose network has since changed."""
        posterior = fit_laplace(mlp(), self.batches, structure="diag")
        change(posterior.network)
        self.watch(posterior.network)
        return posterior


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or a.is_meta:
        return isinstance(a, Tensor) or bool(a == b)
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


def _state(network: nn.Module) -> dict[str, Any]:
    if not isinstance(network, nn.Module) or any(
        isinstance(p, nn.parameter.UninitializedParameter) for p in network.parameters()
    ):
        return {}
    values: dict[str, Any] = {name: t.detach().clone() for name, t in network.state_dict().items()}
    values |= {f"mode of {name}": module.training for name, module in network.named_modules()}
    values |= {
        f"hooks of {name}": len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in network.named_modules()
    }
    return values | {f"gradient of {name}": (p.requires_grad, p.grad is None) for name, p in network.named_parameters()}


OUTPUT = (
    ("output", 2.5, "must be a key, an attribute's name or an index, got 2.5"),
    ("output", True, "must be a key, an attribute's name or an index, got True"),
    ("output", "", "must name an entry of the network's return value, got an empty string"),
    ("output", Of(lambda t: Network("net"), "Network('net')"), "pass the submodule 'net' itself"),
)
