"""What is published: the metadata, a citation, and archives that install and run elsewhere."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
IGNORED = shutil.ignore_patterns(
    ".*", "*.egg-info", "__pycache__", "build", "dist", "site", "outputs", "lightning_logs", "results"
)


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def citation() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version(project: dict[str, Any], citation: dict[str, Any]) -> None:
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    assert citation["repository-code"] == project["urls"]["Source"]
    assert {"message", "title", "authors"} <= citation.keys()


def test_the_citation_has_the_sources_that_users_are_asked_to_cite(citation: dict[str, Any]) -> None:
    pages = [
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/sources.md") if (ROOT / name).exists()
    ]
    (sources,) = [text for page in pages if (text := page.partition("# Sources\n")[2])]
    sources = re.sub(r"\s+", " ", sources)
    named = {title.rstrip(".") for title in re.findall(r"\*([^*]+)\*", sources)}
    assert {paper["title"] for paper in citation["references"]} == named
    for paper in citation["references"]:
        at = sources.index(paper["title"])
        before, after = re.split(r" - |; ", sources[:at])[-1], sources[at + len(paper["title"]) :][:120]
        assert all(author["family-names"] in before for author in paper["authors"]), paper["title"]
        assert len(paper["authors"]) == len(re.findall(r"[^,]+,? ?", before.rstrip("* ").rstrip(".")))
        assert str(paper["year"]) in after


def test_the_changelog_has_the_news_of_this_version(project: dict[str, Any], citation: dict[str, Any]) -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(\d.*)$", text, re.MULTILINE)[0] == f"{project['version']}] - {citation['date-released']}"


def test_the_lowest_versions_are_those_of_the_metadata(project: dict[str, Any]) -> None:
    """What `make test-lowest` installs."""
    lines = (ROOT / ".ci" / "lowest.txt").read_text(encoding="utf-8").splitlines()
    installed = dict(line.split("==") for line in lines if not line.startswith("#"))
    needed = [*project["dependencies"], *itertools.chain.from_iterable(project["optional-dependencies"].values())]
    bounds = [re.match(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", requirement) for requirement in needed]
    lowest = {bound[1]: ".".join([*bound[2].split("."), "0"][:3]) for bound in bounds if bound}
    ours = {name: version for name, version in installed.items() if name != "torchvision"}  # the one for this torch
    assert ours == {name: lowest[name] for name in ours}
    assert {"torch", "lightning", "pytorch-lightning", "torchmetrics", "jsonargparse"} == ours.keys()


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_need_no_secret_and_ask_for_little(path: Path, project: dict[str, Any]) -> None:
    text = path.read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert "secrets." not in text
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    for step in steps:
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", step.get("uses", "actions/checkout@v1")), step
        for target in re.findall(r"^make (\S+)$", step.get("run", ""), re.MULTILINE):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target
    if path.name == "test.yml":
        versions = workflow["jobs"]["newest"]["strategy"]["matrix"]["python"]
        assert [f"Programming Language :: Python :: {version}" for version in versions] == [
            name for name in project["classifiers"] if re.search(r":: 3\.\d+$", name)
        ]


def test_the_metadata_name_each_version_of_python(project: dict[str, Any]) -> None:
    versions = [name.split(" :: ")[-1] for name in project["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert f">={versions[0]}" == project["requires-python"]
    minors = [int(version.split(".")[1]) for version in versions]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert (ROOT / project["readme"]).is_file()
    assert set(project["urls"]) == {"Documentation", "Source", "Changelog", "Issues"}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source archive, and the wheel that is built from it."""
    pytest.importorskip("build", reason="archives are built with the extra `slow`")
    source, dist = (tmp_path_factory.mktemp(name) for name in ("checkout", "dist"))
    shutil.copytree(ROOT, source, ignore=IGNORED, dirs_exist_ok=True)
    words = ["-m", "build", "--no-isolation", "--outdir", str(dist), str(source)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(dist.glob("*.tar.gz")), next(dist.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(archives: tuple[Path, Path], project: dict[str, Any]) -> None:
    with zipfile.ZipFile(archives[1]) as wheel:
        names = set(wheel.namelist())
        info = f"lightning_bayes-{project['version']}.dist-info"
        assert {name.split("/")[0] for name in names} == {"lightning_bayes", info}
        metadata = wheel.read(f"{info}/METADATA").decode()
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_bayes").rglob("*.py")}
    assert {name for name in names if name.startswith("lightning_bayes/")} == ours | {"lightning_bayes/py.typed"}
    assert f"{info}/licenses/LICENSE" in names
    assert "Description-Content-Type: text/markdown" in metadata
    assert (ROOT / "README.md").read_text(encoding="utf-8").strip() in metadata


@pytest.fixture(scope="module")
def elsewhere(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the unpacked source archive, and the Python of an environment that has the wheel.

    With `LIGHTNING_BAYES_INSTALL=all` pip installs the dependencies as well, some gigabytes; otherwise the environment
    uses those of the tests.
    """
    environment, folder = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("elsewhere")
    call(folder, sys.executable, "-m", "venv", str(environment))
    python = str(environment / "bin" / "python")
    packages = Path(call(folder, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    if os.environ.get("LIGHTNING_BAYES_INSTALL") == "all":
        call(folder, python, "-m", "pip", "install", "--quiet", f"{archives[1]}[recipes]")
    else:
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        call(folder, python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(archives[1]))
    with tarfile.open(archives[0]) as sdist:
        sdist.extractall(folder, filter="data")
    where = call(folder, python, "-c", "import lightning_bayes; print(lightning_bayes.__file__)").strip()
    assert Path(where).is_relative_to(packages)
    return folder, python


def call(folder: Path, *words: str) -> str:
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=own, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_quickstart_runs_in_an_environment_of_the_wheel(
    archives: tuple[Path, Path], elsewhere: tuple[Path, str]
) -> None:
    folder, python = elsewhere
    (source,) = folder.glob("lightning_bayes-*")
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "recipes", "tests"} <= set(os.listdir(source))
    printed = call(folder, python, str(source / "recipes" / "quickstart.py"), "--fast", "--output", "results")
    assert "| Laplace " in printed
    made_by = json.loads((folder / "results" / "settings.json").read_text(encoding="utf-8"))["made_by"]
    assert made_by[0]["versions"]["lightning-bayes"] in archives[1].name


USER_PROGRAM = """\
import lightning as L
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import assert_type

from lightning_bayes import GLM, GaussianPosterior, LaplaceCallback, LaplacePosterior, Prediction, Tuning, fit_laplace


def fit(network: nn.Module, loader: DataLoader[list[Tensor]]) -> LaplacePosterior:
    posterior = fit_laplace(network, loader, likelihood="classification", structure="kron")
    fit_laplace(network, loader, likelihood=3)  # type: ignore[arg-type]
    return posterior.tune_prior(Tuning("marglik"), loader=loader)


def score(posterior: GaussianPosterior, x: Tensor) -> Tensor:
    prediction = posterior.predict(x, GLM(link="probit"))
    assert_type(prediction, Prediction)
    assert_type(prediction.probs, Tensor | None)
    outputs: dict[str, Tensor] = posterior.deploy(x)(x)
    return prediction.epistemic_score + posterior.novelty(x) + outputs["novelty"]


laplace = LaplaceCallback(likelihood="classification", tune=None)
trainer = L.Trainer(callbacks=[laplace])
score(laplace.posterior, "x")  # type: ignore[arg-type]
"""


@pytest.mark.slow
def test_a_strictly_typed_program_is_checked_against_the_wheel(elsewhere: tuple[Path, str]) -> None:
    """`--strict` reports a comment that ignores no error, so the two wrong calls must be errors."""
    pytest.importorskip("mypy", reason="mypy is in the extra `dev`")
    folder, python = elsewhere
    (folder / "program.py").write_text(USER_PROGRAM, encoding="utf-8")
    words = ("-m", "mypy", "--strict", "--python-executable", python, "--config-file=", "program.py")
    assert "Success" in call(folder, sys.executable, *words)
