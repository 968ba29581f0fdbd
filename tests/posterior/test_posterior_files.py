"""A posterior's file: written whole or not at all, and whatever is wrong with one is said in one clear sentence."""

import io
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.networks import mlp
from helpers.tensors import TIGHT, real
from posterior_cases import case
from torch import Tensor, nn

from lightning_bayes import GaussianPosterior, LaplacePosterior, fit_laplace
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.posterior.files import digest, write

MEMORY = "memory://posteriors/a.pt"


@pytest.fixture
def posterior() -> LaplacePosterior:
    problem = case("mlp")
    return fit_laplace(problem.network, problem.loader(), problem.likelihood, structure="kron")


@pytest.fixture
def path(posterior: LaplacePosterior, tmp_path: Path) -> Path:
    posterior.save(tmp_path / "posterior.pt")
    return tmp_path / "posterior.pt"


def assert_same(found: GaussianPosterior, expected: LaplacePosterior) -> None:
    x = real(3, 3)
    torch.testing.assert_close(found.functional(x)[1], expected.functional(x)[1], **TIGHT)
    assert torch.equal(found.mean, expected.mean)


def test_a_url_is_a_path_too(posterior: LaplacePosterior, path: Path) -> None:
    """Through fsspec: an object store, or a local file by its URL."""
    for url in (MEMORY, f"file://{path}.copy"):
        posterior.with_prior(3.0).save(url)
        posterior.save(url)
        assert_same(GaussianPosterior.load(url, posterior.network), posterior)
    assert path.with_name("posterior.pt.copy").exists()
    with pytest.raises(FileNotFoundError, match=r"no posterior's file at memory://posteriors/b\.pt: check the path"):
        GaussianPosterior.load("memory://posteriors/b.pt", posterior.network)


def test_a_failure_while_writing_leaves_the_old_file_whole(
    posterior: LaplacePosterior, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    posterior.save(MEMORY)

    def fail(state: Any, file: io.BufferedIOBase) -> None:
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", fail)
    for where in (path, MEMORY):
        with pytest.raises(OSError, match="no space left"):
            posterior.with_prior(7.0).save(where)
        assert_same(GaussianPosterior.load(where, posterior.network), posterior)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a process that can be killed")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_killed_while_overwriting_leaves_the_old_file_whole(
    posterior: LaplacePosterior, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(state: Any, file: io.BufferedWriter) -> None:
        file.write(b"half of a file")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    changed = posterior.with_prior(7.0).state_dict()
    monkeypatch.setattr(torch, "save", die)
    child = os.fork()
    if child == 0:
        try:
            write(changed, path)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert_same(GaussianPosterior.load(path, posterior.network), posterior)
    (unfinished,) = set(path.parent.iterdir()) - {path}
    assert unfinished.name.endswith(".unfinished")
    assert unfinished.read_bytes() == b"half of a file"


def test_a_link_stays_a_link(posterior: LaplacePosterior, path: Path) -> None:
    link = path.with_name("latest.pt")
    link.symlink_to(path)
    changed = posterior.with_prior(7.0)
    changed.save(link)
    assert link.is_symlink()
    assert_same(GaussianPosterior.load(path, posterior.network), changed)


def test_places_that_cannot_be_written_are_named(posterior: LaplacePosterior, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"as .*/a/p\.pt: the folder .*/a does not exist; create it first"):
        posterior.save(tmp_path / "a" / "p.pt")
    with pytest.raises(IsADirectoryError, match="which is a folder: pass the path of a file"):
        posterior.save(tmp_path)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


CUT, REFUSED = "is truncated, or not a posterior's file", "contains Python objects .* could run arbitrary code"
FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda whole: whole[: len(whole) // 2], CUT),
    "text": (lambda _: b"hello", CUT),
    "empty": (lambda _: b"", CUT),
    "plain pickle": (lambda _: pickle.dumps({"format": 3}), CUT),
    "hostile plain pickle": (lambda _: pickle.dumps(Hostile()), CUT),
    "hostile pickle": (lambda _: saved({"format": 3, "mean": Hostile()}), REFUSED),
    "a module": (lambda _: saved(nn.Linear(1, 1)), REFUSED),
    "weights": (
        lambda _: saved(nn.Linear(1, 1).state_dict()),
        r"not contain a posterior, but a dictionary of 'weight', 'bias'",
    ),
    "checkpoint": (
        lambda _: saved(dict.fromkeys("abcd", 0)),
        r"not contain a posterior, but a dictionary of 'a', 'b', 'c', …",
    ),
    "tensor": (lambda _: saved(torch.ones(2)), "does not contain a posterior, but an object of type Tensor"),
    "newer": (lambda _: saved({"format": 99}), r"cannot read a posterior from the state \(format 99\)"),
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_whole_posterior_is_refused_in_one_sentence(
    name: str, posterior: LaplacePosterior, path: Path
) -> None:
    change, message = FILES[name]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(PosteriorError, match=message) as caught:
        GaussianPosterior.load(path, posterior.network)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no posterior's file at .*nothing\.pt: check the path"):
        GaussianPosterior.load(tmp_path / "nothing.pt", mlp())


def test_a_flipped_byte_is_noticed_or_harmless(posterior: LaplacePosterior, path: Path) -> None:
    """Of the bytes that hold names and numbers every one is noticed; an archive also has some that no one reads."""
    whole = path.read_bytes()
    noticed = 0
    places = range(3, len(whole), 97)
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 0x20
        path.write_bytes(bytes(damaged))
        try:
            found = GaussianPosterior.load(path, posterior.network)
        except PosteriorError:
            noticed += 1
        else:
            assert_same(found, posterior)
    assert noticed > len(places) / 4
    number = posterior.curvature.structure.blocks[0].right.values.numpy().tobytes()  # type: ignore[attr-defined]
    place = whole.index(number) + 5
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(PosteriorError, match=r"posterior\.pt is damaged: its contents do not match its digest"):
        GaussianPosterior.load(path, posterior.network)


def broken(state: dict[str, Any], *keys: Any) -> Tensor:
    """The tensor at `keys`, as a copy that may be changed."""
    *to, last = keys
    for key in to:
        state = state[key]
    state[last] = state[last].clone()
    return state[last]


def nan_mean(state: dict[str, Any]) -> None:
    broken(state, "mean")[3] = torch.nan


def infinite_curvature(state: dict[str, Any]) -> None:
    broken(state, "curvature", "blocks", 1, "left", 1)[0, 1] = torch.inf


def short_mean(state: dict[str, Any]) -> None:
    state["mean"] = state["mean"][:-1]


def missing_block(state: dict[str, Any]) -> None:
    for part in ("blocks", "layouts", "names"):
        state["curvature"][part] = state["curvature"][part][:1]


def negative_prior(state: dict[str, Any]) -> None:
    state["prior_precision"] = -state["prior_precision"]


STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "NaN in the mean": (nan_mean, "the posterior's mean contains NaN or infinity: fit the posterior again"),
    "infinite curvature": (infinite_curvature, "the posterior's curvature contains NaN or infinity"),
    "short mean": (short_mean, "its mean has 30 weights, but its parameters have 31"),
    "missing block": (missing_block, "its curvature has 16 weights, but its parameters have 31"),
    "no mean": (lambda state: state.pop("mean"), "incomplete: it has no 'mean'"),
    "no curvature": (lambda state: state.pop("curvature"), "incomplete: it has no 'curvature'"),
    "half a matrix": (lambda state: state["curvature"].pop("blocks"), "incomplete: its matrix cannot be read"),
    "negative prior": (negative_prior, "prior_precision must be positive and finite, got -1"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_does_not_fit_itself_is_refused_from_files_and_checkpoints(
    name: str, posterior: LaplacePosterior, tmp_path: Path
) -> None:
    change, message = STATES[name]
    state = posterior.state_dict()
    change(state)
    with pytest.raises((PosteriorError, ValueError), match=message):
        GaussianPosterior.from_state_dict(posterior.network, state)
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises((PosteriorError, ValueError), match=message):
        GaussianPosterior.load(tmp_path / "state.pt", posterior.network)


def test_a_state_that_is_no_dictionary_is_refused() -> None:
    with pytest.raises(PosteriorError, match=r"cannot read a posterior from the state .* an object of type list"):
        GaussianPosterior.from_state_dict(mlp(), [1, 2])  # type: ignore[arg-type]


def test_an_unknown_likelihood_stays_unknown(posterior: LaplacePosterior, tmp_path: Path) -> None:
    unknown = replace(posterior, curvature=replace(posterior.curvature, log_likelihood=None))
    unknown.save(tmp_path / "unknown.pt")
    loaded = GaussianPosterior.load(tmp_path / "unknown.pt", posterior.network)
    assert isinstance(loaded, LaplacePosterior)
    assert not loaded.curvature.knows_likelihood
    with pytest.raises(PosteriorError, match="computed without a pass over the data"):
        loaded.log_marginal_likelihood()


def test_half_precision_and_empty_tensors_have_a_digest(tmp_path: Path) -> None:
    parts = [torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(0), torch.tensor(True), torch.ones(3, 2).mT, None, 1.5]
    assert digest(parts) == digest([torch.ones(2, 3, dtype=torch.bfloat16), *parts[1:]])
    assert digest(parts) != digest([torch.ones(3, 2, dtype=torch.bfloat16), *parts[1:]])
    assert digest({"a": [1], "b": 2}) != digest({"a": [], "b": [1, 2]})
