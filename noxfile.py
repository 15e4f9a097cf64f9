"""Sessions that develop, test and release this package: `nox -l` lists them, and `make NAME` runs one.

Sessions share the environments in the folders `.venv-NAME`, because nox would create one per session, each with its
own torch. An environment contains dependency groups of pyproject.toml, in the versions of requirements/constraints.txt.
make passes variables (`make test-gpu DRY=yes`) to the sessions as environment variables.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import nox

nox.needs_version = ">=2026.10.20"
nox.options.default_venv_backend = "none"
nox.options.envdir = ".build/matrix"  # only test-matrix uses environments created by nox
nox.options.download_python = "never"
nox.options.sessions = ["test"]

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / ".build"
REPORTS = BUILD / "test-reports"
SECONDS = BUILD / "test-seconds.json"
LOCK = ROOT / "requirements" / "constraints.txt"
UV = str(Path(sys.executable).with_name("uv"))
VARIABLES = os.environ
CHROMIUM = VARIABLES.get("CHROMIUM") or shutil.which("chromium")
KERNELS = ("6.31.0", "7.3.0", "7.4.0")
TRANSFORMERS = ("4.57.3", "5.0.0")
HOSTED_TORCH = "torch==2.11.0"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# The first is the minimum that pyproject.toml declares.
TORCH = {"oldest": "torch~=2.9.0", "middle": "torch~=2.11.0", "newest": "torch"}
# Run DeepSpeed on the CPU, and compile its C++ optimizer inside this checkout.
DEEPSPEED = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(BUILD / "torch-extensions")}

# pyenv puts only the chosen version on PATH. Append the others, so that they do not take precedence over anything.
VARIABLES["PATH"] += "".join(
    f"{os.pathsep}{folder}"
    for folder in sorted(Path(VARIABLES.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions").glob("3.*/bin"))
)
# Keep bytecode even if the caller's shell disables it, because kernels and ranks import the package hundreds of times.
VARIABLES.pop("PYTHONDONTWRITEBYTECODE", None)


@dataclass(frozen=True)
class Environment:
    """A folder `.venv-NAME` with a Python and packages.

    Attributes:
        groups: Groups of pyproject.toml.
        overrides: Versions that replace those of the lock, because a package of this environment requires them.
        without: Packages that are left out even though others require them.
        python: A version of Python, or "" for the one that runs nox.
        files: Files in requirements/ that list a notebook service's packages. They replace the groups and the lock.
    """

    groups: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    python: str = ""
    files: tuple[str, ...] = ()


# The libraries in these environments must find this package instead of Accelerate. fastai needs the others for images
# and texts only.
CLIENTS = ("accelerate", "spacy", "torchvision")
ENVIRONMENTS = {
    "": Environment(("dev", "browser") if CHROMIUM else ("dev",)),
    "bench": Environment(("dev", "peer")),
    "bench-deepspeed": Environment(("dev", "bench-deepspeed")),
    "clients": Environment(("dev", "clients"), without=CLIENTS),
    "colab": Environment(python="3.13", files=("hosted", "colab")),
    "cuda": Environment(("dev",), (HOSTED_TORCH, "setuptools==81.0.0"), python="3.12"),
    "deepspeed": Environment(("dev", "deepspeed")),
    "dist": Environment(("dist",), ("importlib-metadata==10.2.0",)),
    "docs": Environment(("dev", "docs"), ("docutils==0.22.4",), CLIENTS),
    "kaggle": Environment(python="3.12", files=("hosted", "kaggle")),
    "marimo": Environment(("dev", "marimo"), ("narwhals==2.29.0",)),
    "megatron": Environment(("dev", "megatron")),
    "parity": Environment(("dev", "parity")),
    "ray": Environment(("dev", "ray")),
    "s3": Environment(("dev", "s3"), ("python-dateutil==2.9.0.post0",)),
    "tpu": Environment(("tpu",), ("cloudpickle==3.1.2",), python="3.12"),
    "trackers": Environment(
        ("dev", "trackers"),
        (
            "boto3==1.44.5", "botocore==1.44.5", "filelock==3.32.7", "pillow==12.3.0", "protobuf==6.33.6",
            "python-dateutil==2.9.0.post0",
        ),
    ),
    "xla": Environment(("xla",), ("cloudpickle==3.1.2", "torch==2.9.0")),
}  # fmt: skip


def environment(session: nox.Session, name: str = "", *, extra: str = "") -> str:
    """Create or update an environment, and return its Python. If nothing has changed, this needs no network.

    Args:
        session: The session.
        name: A key of ENVIRONMENTS.
        extra: One more group.
    """
    if VARIABLES.get("PY"):
        return VARIABLES["PY"]  # the caller's environment, for example on a machine with a GPU
    wanted = ENVIRONMENTS[name]
    groups = (*wanted.groups, *filter(None, [extra]))
    folder = ROOT / (f".venv-{name}" if name else ".venv")
    python = str(folder / "bin" / "python")
    sources = [ROOT / "pyproject.toml", LOCK, *(requirements(file) for file in wanted.files)]
    contents = "".join(path.read_text() for path in sources)
    digest = hashlib.sha256(f"{wanted} {groups} {contents}".encode()).hexdigest()
    ready = folder / ".ready"
    if ready.exists() and ready.read_text() == digest:
        return python
    if not Path(python).exists():
        # `uv venv` would leave out pip, which the tests of installations use.
        session.run(interpreter(session, wanted.python), "-m", "venv", str(folder), silent=True)
    if wanted.files:
        install(session, python, HOSTED_TORCH)
        install(session, python, "--no-deps", *(f"-r{requirements(file)}" for file in wanted.files))
    else:
        replaced = {line.partition("==")[0] for line in wanted.overrides}
        pins = [line for line in LOCK.read_text().splitlines() if line.partition("==")[0] not in replaced]
        (folder / "constraints.txt").write_text("\n".join([*pins, *wanted.overrides]))
        (folder / "excludes.txt").write_text("\n".join(wanted.without))
        project = () if name == "dist" else ("-r", "pyproject.toml")
        files = ("-c", str(folder / "constraints.txt"), "--excludes", str(folder / "excludes.txt"))
        install(session, python, *project, *(f"--group={group}" for group in groups), *files)
        if "dev" in groups:
            install(session, python, "--no-deps", "--no-build-isolation", "-e", ".")
    ready.write_text(digest)
    return python


def requirements(name: str) -> Path:
    """Return the path of a requirements file."""
    return ROOT / "requirements" / f"{name}.txt"


def install(session: nox.Session, python: str, *arguments: str) -> None:
    """Install packages into an environment with `uv pip install`."""
    session.run(UV, "pip", "install", "--quiet", "--python", python, *arguments, env=indexes())


def indexes() -> dict[str, str]:
    """Return variables that point uv to the package indexes in pip's configuration, which uv does not read."""
    names = {
        "cert": "SSL_CERT_FILE",
        "constraint": "UV_CONSTRAINT",
        "extra-index-url": "UV_INDEX",
        "find-links": "UV_FIND_LINKS",
        "index-url": "UV_DEFAULT_INDEX",
        "trusted-host": "UV_INSECURE_HOST",
    }
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # pip searches all indexes, too
    for option, value in re.findall(r"^(?:global|install|:env:)\.([\w-]+)=('.*')$", listed, re.MULTILINE):
        if option in names:
            separator = "," if option == "find-links" else " "
            found[names[option]] = separator.join(ast.literal_eval(value).split())
    return {name: value for name, value in found.items() if name not in VARIABLES}


def interpreter(session: nox.Session, version: str) -> str:
    """Return the path of a Python that is in PATH or was installed by pyenv or uv.

    Args:
        session: The session.
        version: Its version, such as 3.12. If "", the version that runs nox, or a newer one if the lock requires that.
    """
    if not version and (3, 11, 5) <= sys.version_info < (3, 14):
        return sys.executable
    command = [UV, "python", "find", "--no-python-downloads", "--system", version or ">=3.11.5,<3.14"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        session.error(f"there is no Python {version or '3.11.5 or newer'}: {found.stderr.strip()}")
    return found.stdout.strip()


def pytest(session: nox.Session, python: str, *arguments: str, **variables: str | None) -> None:
    """Run pytest with an environment's Python; its results are also written to .build/test-reports."""
    name = re.sub(r"\W+", "-", session.name).strip("-")
    options = ["--tb=short", "--durations=10", "-o", f"cache_dir=.build/pytest-{name}"]
    options += [f"--junitxml={REPORTS / name}.xml", "-m", "not benchmark"]
    # With CI or BUILD_NUMBER set, pytest does not shorten the texts of failed comparisons, which can be whole pages.
    env = {"OMP_NUM_THREADS": "1", "CI": None, "BUILD_NUMBER": None, **variables}
    session.run(python, "-m", "pytest", *options, *arguments, *session.posargs, env=env, success_codes=[0])


def together(session: nox.Session, tag: str, lanes: int) -> None:
    """Run the sessions with a tag, a few at a time, and print the totals of their tests like pytest's last line.

    Args:
        session: The session.
        tag: The tag.
        lanes: The number of sessions that run at a time. It is greater than the number of cores of the smallest
            machine, because each session spends half of its time waiting.
    """
    environment(session)  # once, not in each lane
    shutil.rmtree(REPORTS, ignore_errors=True)
    begin = time.monotonic()
    command = [sys.executable, "-m", "nox", "-f", __file__, "-j", str(lanes), "-t", tag]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    counts: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for path in sorted(REPORTS.glob("*.xml")):
        for case in ET.parse(path).iter("testcase"):
            # A test in a class has the name of the class after the module's.
            seconds[re.sub(r"(\.[A-Z]\w*)+$", "", str(case.get("classname")))] += float(case.get("time", 0))
            kinds = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
            counts[kinds[0] if kinds else "passed"] += 1
            if kinds and kinds[0] != "skipped":
                print(f"{kinds[0].upper()} {case.get('classname')}::{case.get('name')} ({path.stem})")
    if "TEST_UNTIL" not in VARIABLES:  # Otherwise, tests may have been skipped.
        SECONDS.write_text(json.dumps({**measured_seconds(), **seconds}, indent=0))
    words = {"failure": "failed", "passed": "passed", "skipped": "skipped", "error": "errors"}
    text = ", ".join(f"{counts[kind]} {word}" for kind, word in words.items() if counts[kind])
    print(f"\n{f' {text} in {time.monotonic() - begin:.2f}s ':=^120}", flush=True)
    if code or not (counts["passed"] or "TEST_UNTIL" in VARIABLES):
        session.error(f"some sessions failed; the results are in {REPORTS.relative_to(ROOT)}")


def measured_seconds() -> dict[str, float]:
    """Return the seconds that each module of tests took when it ran last in this checkout."""
    seconds: dict[str, float] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    return seconds


@nox.session
def setup(session: nox.Session) -> None:
    """Create .venv, with the package installed in place."""
    environment(session)


@nox.session
def demo(session: nox.Session) -> None:
    """Execute the quickstart in a real Jupyter kernel: it trains in two worker processes."""
    session.run(environment(session), "examples/run_headless.py", "examples/01_quickstart.ipynb")


@nox.session
def lab(session: nox.Session) -> None:
    """Open the examples in JupyterLab."""
    root = ["--allow-root"] if os.geteuid() == 0 else []
    session.run(environment(session, extra="lab"), "-m", "jupyterlab", *root, "examples", *session.posargs)


@nox.session
def test(session: nox.Session) -> None:
    """Run the linters, and the unit, distributed, notebook, fault and browser tests."""
    together(session, "everyday", lanes=4)


@nox.session(name="test-integrations")
def test_integrations(session: nox.Session) -> None:
    """Run the tests with separate environments: DeepSpeed, Megatron-LM, Ray, S3, Accelerate, its clients, the docs."""
    together(session, "integrations", lanes=3)


@nox.session(name="test-nightly")
def test_nightly(session: nox.Session) -> None:
    """Run test and test-integrations with the nightly cases, after compiling DeepSpeed's optimizer; takes hours."""
    python = environment(session, "deepspeed")
    program = (
        "from notebook_accelerate.strategies.deepspeed.deepspeed_engine import compilation_context\n"
        "from deepspeed.ops.op_builder import CPUAdamBuilder\n"
        "compilation_context()\n"
        "CPUAdamBuilder().load(verbose=False)"
    )
    # Compiling takes minutes and 2 GB of memory. Without it, the test of that optimizer is skipped.
    path = f"{Path(python).parent}{os.pathsep}{VARIABLES['PATH']}"
    session.run(python, "-c", program, env={**DEEPSPEED, "OMP_NUM_THREADS": "1", "MAX_JOBS": "1", "PATH": path})
    VARIABLES["TEST_NIGHTLY"] = "yes"
    together(session, "everyday", lanes=4)
    VARIABLES["TEST_GPU"] = "dry"
    pytest(session, environment(session), "-m", "gpu", "tests/gpu")
    del VARIABLES["TEST_GPU"]
    together(session, "integrations", lanes=3)


@nox.session(tags=["everyday"], allow_parallel=True)
def lint(session: nox.Session) -> None:
    """Run ruff, mypy and import-linter."""
    python = environment(session)
    session.run(python, "-m", "ruff", "check", ".")
    session.run(python, "-m", "ruff", "format", "--check", ".")
    session.run(python, "-m", "mypy")
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    session.run(python, "-c", program, env={"PYTHONPATH": str(ROOT)})


# Long groups are split into parts, and short groups run last: otherwise one long group would still be running after all
# others had ended. The first parts of all groups come first.
PARTS = {"notebook": 3, "distributed": 1, "browser": 2, "unit": 4, "faults": 3}
SHORT = {"rules": ("architecture", "parity/surface", "docs/static"), "devices": ("gpu", "tpu", "xla")}
EVERYDAY = [f"{name}-{part}" for part in range(1, 5) for name, parts in PARTS.items() if part <= parts]


@nox.session(tags=["everyday"], allow_parallel=True)
@nox.parametrize("group", [nox.param(name, id=name) for name in (*EVERYDAY, *SHORT)])
def tests(session: nox.Session, group: str) -> None:
    """Run one group of tests, or a part of one."""
    pytest(session, environment(session), *files(group))


def files(group: str) -> Iterable[str]:
    """Return the folders or files of a group of everyday tests.

    Args:
        group: A name in SHORT, or one in PARTS with the number of the part.
    """
    if group in SHORT:
        return [f"tests/{folder}" for folder in SHORT[group]]
    name, _, part = group.rpartition("-")
    measured = measured_seconds()
    paths = [path.relative_to(ROOT) for path in (ROOT / "tests" / name).rglob("test_*.py")]
    # Estimate the time of a file that has not run here from its size.
    seconds = {path: measured.get(".".join(path.with_suffix("").parts), path.stat().st_size / 500) for path in paths}
    totals, parts = [0.0] * PARTS[name], [list[str]() for _ in range(PARTS[name])]
    # Deal out the files from the slowest to the fastest, each to the shortest part.
    for path in sorted(paths, key=lambda path: (-seconds[path], path)):
        shortest = totals.index(min(totals))
        totals[shortest] += seconds[path]
        parts[shortest].append(str(path))
    return sorted(parts[int(part) - 1])


def examples(session: nox.Session, outputs: str, *, own: bool = True, ported: bool = True) -> None:
    """Execute notebooks, and compare their outputs with the committed ones, or replace the committed ones.

    Args:
        session: The session.
        outputs: "compare"; "record"; or "record-all", which also replaces outputs in which only numbers have changed.
        own: Whether to execute the examples that use only this package.
        ported: Whether to execute the examples that use transformers, diffusers and trl.
    """
    for chosen, folder, name in ((own, "examples", ""), (ported, "examples/ported", "clients")):
        if chosen:
            python = environment(session, name)
            notebooks = sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).glob("*.ipynb"))
            env = {"HF_HUB_OFFLINE": "1"} if name else {}
            session.run(python, "examples/run_headless.py", *notebooks, env=env)
            session.run(python, "-m", "tests.support.saved_outputs", outputs, *notebooks)


@nox.session(name="examples")
def all_examples(session: nox.Session) -> None:
    """Execute all example notebooks, and compare their outputs with the committed ones."""
    examples(session, "compare")


@nox.session(name="examples-own")
def own_examples(session: nox.Session) -> None:
    """Execute the example notebooks that use only this package."""
    examples(session, "compare", ported=False)


@nox.session(name="examples-ported")
def ported_examples(session: nox.Session) -> None:
    """Execute the example notebooks that use transformers, diffusers and trl."""
    examples(session, "compare", own=False)


@nox.session(name="examples-record")
def record_examples(session: nox.Session) -> None:
    """Execute all example notebooks, and replace changed outputs; with ALL=yes, even if only numbers changed."""
    examples(session, "record-all" if VARIABLES.get("ALL") else "record")


# The longest sessions come first, so that only short ones are left at the end.
@nox.session(name="test-deepspeed", tags=["integrations"], allow_parallel=True)
def test_deepspeed(session: nox.Session) -> None:
    """Test DeepSpeed's ZeRO, all stages, on the CPU."""
    python = environment(session, "deepspeed")
    pytest(session, python, "tests/parity/strategies/test_deepspeed.py", "tests/deepspeed", **DEEPSPEED)


@nox.session(name="test-strategies", tags=["integrations"], allow_parallel=True)
def test_strategies(session: nox.Session) -> None:
    """Compare each strategy, and complete training runs, with plain torch."""
    pytest(session, environment(session), "tests/parity/strategies", "tests/parity/training")


@nox.session(name="test-ray", tags=["integrations"], allow_parallel=True)
def test_ray(session: nox.Session) -> None:
    """Test ranks on Ray clusters of two and three nodes."""
    pytest(session, environment(session, "ray"), "tests/ray")


@nox.session(name="test-megatron", tags=["integrations"], allow_parallel=True)
def test_megatron(session: nox.Session) -> None:
    """Test Megatron-LM's GPT, BERT and T5, split over ranks."""
    pytest(session, environment(session, "megatron"), "tests/megatron")


@nox.session(name="test-s3", tags=["integrations"], allow_parallel=True)
def test_s3(session: nox.Session) -> None:
    """Test checkpoints in an S3 server on this machine."""
    pytest(session, environment(session, "s3"), "tests/s3")


@nox.session(name="test-cuda", tags=["integrations"], allow_parallel=True)
def test_cuda(session: nox.Session) -> None:
    """Test torch's build for CUDA with libraries in place of the driver. Needs Python 3.12 and 5 GB, but no GPU."""
    pytest(session, environment(session, "cuda"), "tests/cuda", PYTHONPATH=str(ROOT))


@nox.session(name="test-parity", tags=["integrations"], allow_parallel=True)
def test_parity(session: nox.Session) -> None:
    """Compare behaviour, random programs, checkpoints, losses and weights with the real Accelerate."""
    python = environment(session, "bench-deepspeed")
    both_sides = (python, "-m", "tests.parity.behaviour.both_sides", "deepspeed.")
    session.run(*both_sides, env={**DEEPSPEED, "OMP_NUM_THREADS": "1"})
    folders = [f"tests/parity/{name}" for name in ("behaviour", "random_programs", "checkpoints", "commands")]
    pytest(session, environment(session, "parity"), *folders, "tests/parity/training/test_accelerate.py")


@nox.session(name="test-clients", tags=["integrations"], allow_parallel=True)
def test_clients(session: nox.Session) -> None:
    """Test training libraries in ranks, with this package as their accelerate."""
    python = environment(session, "clients")
    # The real Accelerate is not on the path of the environment. Only the reference processes of the tests import it.
    into(session, python, Path(python).parents[1] / "peer", "accelerate", "-c", str(LOCK))
    for version in TRANSFORMERS:
        group = f"--group=transformers-{version.replace('.', '-')}"
        into(session, python, BUILD / "transformers" / version, group)
    into(session, python, BUILD / "unsloth", "--group=unsloth")
    pytest(session, python, "tests/clients")


def into(session: nox.Session, python: str, folder: Path, *arguments: str) -> None:
    """Install packages without their dependencies into a folder that is put on the path, unless they are there already.

    Args:
        session: The session.
        python: The Python that will import them.
        folder: The folder.
        arguments: Arguments of `uv pip install`.
    """
    ready = folder / ".ready"
    wanted = " ".join(arguments) + (ROOT / "pyproject.toml").read_text() + LOCK.read_text()
    if not ready.exists() or ready.read_text() != wanted:
        install(session, python, "--no-deps", "--target", str(folder), *arguments)
        ready.write_text(wanted)


@nox.session(name="test-docs", tags=["integrations"], allow_parallel=True)
def test_docs(session: nox.Session) -> None:
    """Build the site, failing on warnings, and run all of its code blocks in kernels with real ranks."""
    python = environment(session, "docs", extra="docs-tests")
    site(session, python)
    texts = ("docs", "examples", "notebook_accelerate", "widgets", *(path.name for path in ROOT.glob("*.md")))
    session.run(python, "-m", "codespell_lib", *texts)
    pytest(session, python, "tests/docs", **DEEPSPEED, HF_HUB_OFFLINE="1")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation in .build/docs."""
    site(session, environment(session, "docs"))
    session.log("open .build/docs/index.html")


def site(session: nox.Session, python: str) -> None:
    """Run Sphinx, which fails on any warning."""
    options = ("-W", "--keep-going", "-q", "-d", ".build/doctrees")
    session.run(python, "-m", "sphinx", *options, "docs", ".build/docs", env={"PYTHONPATH": str(ROOT)})


@nox.session(name="test-notebook")
def test_notebook(session: nox.Session) -> None:
    """Run the tests that start Jupyter kernels."""
    pytest(session, environment(session), "-m", "notebook", "tests")


@nox.session(name="test-browser")
def test_browser(session: nox.Session) -> None:
    """Test panels in JupyterLab and Notebook; needs chromium (apt-get install chromium)."""
    pytest(session, environment(session), "tests/browser")


@nox.session(name="test-kernels")
def test_kernels(session: nox.Session) -> None:
    """Run the tests that start Jupyter kernels, with several versions of ipykernel."""
    python = environment(session)
    for version in KERNELS:
        folder = BUILD / "kernels" / version
        into(session, python, folder, f"ipykernel=={version}", "nest-asyncio==1.6.0")
        chosen = {"TEST_KERNEL_VERSION": version, "TEST_KERNEL_PATH": str(folder)}
        pytest(session, python, "-m", "notebook", "tests", **chosen)


def hosted(session: nox.Session, name: str) -> None:
    """Run tests with the versions of a notebook service; TESTS="tests/notebook ..." selects some."""
    groups = ("hosted", "unit/launch", "unit/telemetry", "unit/widgets", "unit/support", "notebook", "faults")
    paths = VARIABLES.get("TESTS", "").split() or [f"tests/{group}" for group in groups]
    service = {"TEST_KERNEL_VERSION": "6.17.1", "TEST_HOSTED": name, "PYDEVD_USE_FRAME_EVAL": "NO"}
    pytest(session, environment(session, name), *paths, **service, PYTHONPATH=str(ROOT))


@nox.session(name="test-colab")
def test_colab(session: nox.Session) -> None:
    """Test with the versions of Colab's image; TESTS=... selects some. Needs Python 3.13 and 5 GB."""
    hosted(session, "colab")


@nox.session(name="test-kaggle")
def test_kaggle(session: nox.Session) -> None:
    """Test with the versions of Kaggle's image; TESTS=... selects some. Needs Python 3.12 and 5 GB."""
    hosted(session, "kaggle")


@nox.session(name="test-marimo")
def test_marimo(session: nox.Session) -> None:
    """Test a launch in marimo's editor, in chromium."""
    pytest(session, environment(session, "marimo"), "tests/marimo")


@nox.session(name="test-trackers")
def test_trackers(session: nox.Session) -> None:
    """Test every vendor's tracker, offline. Needs an environment of 156 packages."""
    pytest(session, environment(session, "trackers"), "tests/unit/tracking/test_vendors.py")


@nox.session(name="test-xla")
def test_xla(session: nox.Session) -> None:
    """Test training on torch_xla's CPU device. Needs an environment of 7 GB."""
    pytest(session, environment(session, "xla"), "tests/xla", PJRT_DEVICE="CPU")


@nox.session(name="test-tpu")
def test_tpu(session: nox.Session) -> None:
    """Test training on TPUs with torch_tpu. Needs Python 3.12; tests that need a TPU are skipped without one."""
    units = ("tests/unit/hardware/test_tpu.py", "tests/unit/launch/test_tpu_ranks.py")
    pytest(session, environment(session, "tpu"), "tests/tpu", *units)


@nox.session(name="test-gpu")
def test_gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA device; PY=python uses your environment, DRY=yes tries them on the CPU."""
    dry = {"TEST_GPU": "dry", "OMP_NUM_THREADS": "1"} if VARIABLES.get("DRY") else {"OMP_NUM_THREADS": None}
    pytest(session, environment(session), "-m", "gpu", "tests/gpu" if VARIABLES.get("DRY") else "tests", **dry)


@nox.session(name="test-gpu-day")
def test_gpu_day(session: nox.Session) -> None:
    """Run the checks that fit into nine minutes on a machine with one GPU; DRY=yes runs them on the CPU."""
    dry = {"TEST_GPU": "dry", "OMP_NUM_THREADS": "1"} if VARIABLES.get("DRY") else {"OMP_NUM_THREADS": "4"}
    session.run(environment(session), "-m", "tests.gpu.day", env=dry)


@nox.session(name="gpu-day-wheels")
def gpu_day_wheels(session: nox.Session) -> None:
    """Download the packages that test-gpu-day needs on a machine without a network (see tests/gpu/day/run.sh)."""
    folder = BUILD / "gpu-day-wheels"
    folder.mkdir(parents=True, exist_ok=True)
    names = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "gpu-day")
    options = ["-qq", "--no-deps", "--only-binary=:all:", "--dest", str(folder), "-c", str(LOCK)]
    options += ["--python-version", "3.12", "--implementation", "cp"]
    tags = ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1")
    options += [f"--platform=manylinux{tag}_x86_64" for tag in tags]
    session.run(sys.executable, "-m", "pip", "download", *options, *names)
    session.run(sys.executable, "-m", "tests.gpu.day.wheels", str(folder))


@nox.session
def soak(session: nox.Session) -> None:
    """Run random launches, faults, stops and saves in one kernel for MINUTES=60, and check that nothing grows."""
    minutes = VARIABLES.get("MINUTES", "60")
    session.run(environment(session), "-m", "tests.soak", "--minutes", minutes, env={"OMP_NUM_THREADS": "1"})


@nox.session(name="client-names")
def client_names(session: nox.Session) -> None:
    """Download libraries that import accelerate, and write the table of the names and attributes that they use."""
    python = environment(session)
    folder = BUILD / "clients"
    shutil.rmtree(folder, ignore_errors=True)
    names = (
        "axolotl", "compressed-tensors", "diffusers", "fastai", "llamafactory", "lm-eval", "ms-swift", "optimum",
        "peft", "pytorch-accelerated", "sentence-transformers", "torchkeras", "transformers", "trl", "unsloth",
        "unsloth-zoo",
    )  # fmt: skip
    # Some libraries no longer support the Python of the environment. The sources of the newest versions are scanned.
    download = ("download", "-qq", "--no-deps", "--only-binary=:all:", f"--python-version={PYTHONS[-1]}")
    session.run(python, "-m", "pip", *download, "--dest", str(folder), *names)
    session.run(python, "-m", "tests.parity.surface.client_names", str(folder))


@nox.session
def dist(session: nox.Session) -> None:
    """Build the sdist and the wheel in dist/, and check them as the package index does."""
    python = environment(session, "dist")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run(python, "-m", "build", "--no-isolation")
    session.run(python, "-m", "twine", "check", "--strict", *map(str, sorted((ROOT / "dist").iterdir())))


@nox.session
def pictures(session: nox.Session) -> None:
    """Take the pictures of the documentation in JupyterLab; needs chromium."""
    for module in ("tests.support.pictures", "tests.support.moving_picture"):
        session.run(environment(session), "-m", module, env={"OMP_NUM_THREADS": "1"})


def benchmarks(session: nox.Session, *options: str) -> None:
    """Run the areas or rows in ROWS, or all if it is not set, each in the environment that it needs."""
    rows = shlex.split(VARIABLES.get("ROWS", ""))
    apart = {
        "": ["browser"],
        "bench-deepspeed": ["strategies", "zero", "trainer"],
        "clients": ["lightning"],
        "ray": ["ray"],
    }
    # The environment with Accelerate comes last, because its version is on the page.
    for name, areas in apart.items():
        chosen = [row for row in rows if row in areas] if rows else areas
        if chosen:
            measure(session, name, *options, *chosen)
    areas = [area for several in apart.values() for area in several]
    others = [row for row in rows if row not in areas] if rows else ["--but", *areas]
    if others:
        measure(session, "bench", *options, *others)


def measure(session: nox.Session, name: str, *arguments: str) -> None:
    """Run benchmarks in an environment."""
    session.run(environment(session, name), "-m", "benchmarks", *arguments, env={"OMP_NUM_THREADS": "1"})


@nox.session
def bench(session: nox.Session) -> None:
    """Measure times and memory side by side with Accelerate; ROWS=launch selects some rows."""
    benchmarks(session)


@nox.session(name="bench-record")
def bench_record(session: nox.Session) -> None:
    """Measure, record the figures, and write docs/benchmarks.md; ROWS=launch selects some rows."""
    benchmarks(session, "--record")


@nox.session(name="bench-quick")
def bench_quick(session: nox.Session) -> None:
    """Measure the ten rows that matter most, in five minutes."""
    measure(session, "bench", "--quick")


# The groups of tests that test-matrix runs besides the quickstart, with their pytest arguments.
MATRIX = {
    "unit": ("tests/unit", "--ignore=tests/unit/launch"),
    "launch": ("tests/unit/launch",),
    "notebook": ("tests/notebook",),
    "distributed": ("tests/distributed",),
}


@nox.session(name="test-matrix", venv_backend="uv", python=PYTHONS, reuse_venv=True)
@nox.parametrize("torch", [nox.param(version, id=name) for name, version in TORCH.items()])
def test_matrix(session: nox.Session, torch: str) -> None:
    """Test the wheel on each Python and torch (hours); CELL="3.10(oldest)" TESTS="quickstart unit" selects some."""
    VARIABLES.update(indexes())
    chosen = VARIABLES.get("TESTS", "").split() or ["quickstart", *MATRIX]
    folder = Path(session.virtualenv.location)
    distributions = build(session, folder / "dist")
    tree = copy_of_the_tree(folder / "tree")
    session.install(torch)
    with session.chdir(tree):
        for distribution in distributions if "quickstart" in chosen else ():
            # Install only the package's own dependencies, and what the notebook imports.
            session.install("--reinstall-package=notebook-accelerate", str(distribution))
            session.install("--group=quickstart")
            session.run("python", "examples/run_headless.py", "examples/01_quickstart.ipynb", env={"PYTHONPATH": None})
        session.install(str(distributions[-1]), "--group=matrix")
        failed = []
        for group in (name for name in MATRIX if name in chosen):
            try:
                pytest(session, "python", *MATRIX[group], PYTHONPATH=None)
            except nox.command.CommandFailed:
                failed.append(group)  # run the other groups anyway
    if failed:
        session.error(f"failed groups: {', '.join(failed)}")


def build(session: nox.Session, folder: Path) -> list[Path]:
    """Build the sdist, and the wheel from it; return their paths in this order."""
    shutil.rmtree(folder, ignore_errors=True)
    python = environment(session, "dist")
    session.run(python, "-m", "build", "--no-isolation", "--outdir", str(folder), external=True, silent=True)
    return [*folder.glob("*.tar.gz"), *folder.glob("*.whl")]


def copy_of_the_tree(folder: Path) -> Path:
    """Copy the tests and what they read, but not the package, which the tests would import instead of the wheel."""

    def left_out(path: str, names: list[str]) -> set[str]:
        packages = {"notebook_accelerate", "widgets", "build", "dist"} if Path(path) == ROOT else {"__pycache__"}
        return {name for name in names if name in packages or (Path(path) == ROOT and name.startswith("."))}

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT, folder, ignore=left_out)
    return folder
