"""Builds of the C++ runtime: the choice between CPU and CUDA, error messages, and the build's information."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import setuptools
import torch

from lightning_deepcompile.installation import load_prebuilt, variants

ROOT = Path(__file__).resolve().parents[2]
PIECES = ("cuda_runtime.h", "crt/host_defines.h", "nv/target", "nccl.h")


@pytest.fixture
def build(monkeypatch):
    """`setup.py` as a module, without running the setup; toolkits of this machine are out of sight."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("LDC_BUILD", "cpu")
    spec = importlib.util.spec_from_file_location("ldc_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ldc_setup", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "pip_nvidia_dirs", list)
    monkeypatch.setattr(module, "toolkit_dirs", list)
    return module


@pytest.fixture
def toolkit(build, monkeypatch, tmp_path):
    """A folder with every header of a CUDA build."""
    include = tmp_path / "include"
    for piece in PIECES:
        (include / piece).parent.mkdir(parents=True, exist_ok=True)
        (include / piece).write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 9\n")
    monkeypatch.setattr(build, "toolkit_dirs", lambda: [tmp_path])
    return include


def test_build_info_describes_this_build():
    from lightning_deepcompile import _C

    info = _C.build_info()
    assert set(info) == {"mode", "reason", "nccl", "compiler", "torch"}
    assert info["mode"] in ("cpu", "cuda") and all(info.values())
    assert torch.__version__.split("+")[0] == info["torch"]
    assert (info["nccl"] == "none") == (info["mode"] == "cpu")
    # A build for CUDA loads without, too, and uses the NCCL that PyTorch has loaded.
    loaded = info["mode"] == "cuda" and torch.version.cuda is not None
    assert _C.found_nccl() == (".".join(map(str, torch.cuda.nccl.version())) if loaded else "")


def test_cpu_on_request(build, toolkit):
    plan = build.make_plan()
    assert not plan.cuda and plan.reason == "LDC_BUILD=cpu"
    assert not {*build.CUDA_SOURCES} & {*build.make_extension(plan).sources}


@pytest.mark.parametrize("mode", ["auto", "cuda"])
@pytest.mark.parametrize("torch_has", [None, "13.0"])
def test_cuda_when_every_header_is_there(build, toolkit, monkeypatch, mode, torch_has):
    monkeypatch.setenv("LDC_BUILD", mode)
    monkeypatch.setattr(torch.version, "cuda", torch_has)
    plan = build.make_plan()
    assert plan.cuda and plan.nccl_version == "2.28.9"
    assert plan.include_dirs == [str(toolkit)]
    extension = build.make_extension(plan)
    assert {*build.CUDA_SOURCES} <= {*extension.sources} and ("LDC_WITH_NCCL", "1") in extension.define_macros


@pytest.mark.parametrize("piece", PIECES)
def test_a_missing_piece_is_named_with_its_remedy(build, toolkit, monkeypatch, piece):
    (toolkit / piece).unlink()
    monkeypatch.setenv("LDC_BUILD", "auto")
    plan = build.make_plan()
    assert not plan.cuda and piece in plan.reason and "pip install" in plan.reason
    monkeypatch.setenv("LDC_BUILD", "cuda")
    with pytest.raises(SystemExit, match=f"{piece}.*pip install"):
        build.make_plan()


def test_unknown_mode_is_refused(build, monkeypatch):
    monkeypatch.setenv("LDC_BUILD", "gpu")
    with pytest.raises(SystemExit, match="'auto', 'cpu' or 'cuda', got 'gpu'"):
        build.make_plan()


def test_a_folder_of_sources_is_compiled_as_one_file(build, tmp_path):
    """Torch's headers are read five times, not once for each of 33 sources."""
    for cuda in (False, True):
        sources = build.make_extension(build.BuildPlan(cuda=cuda, reason="")).sources
        units = build.write_units(sources, tmp_path)
        assert [Path(unit).stem for unit in units] == ["bindings", "base", "communicators", "executors", "memory"]
        lines = [line for unit in units for line in Path(unit).read_text().splitlines()]
        assert sorted(lines) == sorted(f'#include "{ROOT / source}"' for source in sources)
    written = Path(units[0]).stat().st_mtime_ns
    assert build.write_units(sources, tmp_path) == units and Path(units[0]).stat().st_mtime_ns == written


def test_a_compile_error_fails_the_build(tmp_path, monkeypatch):
    (tmp_path / "setup.py").write_text((ROOT / "setup.py").read_text())
    (tmp_path / "csrc" / "folder").mkdir(parents=True)
    (tmp_path / "csrc" / "folder" / "broken.cpp").write_text("#error this file does not compile\n")
    (tmp_path / "lightning_deepcompile").mkdir()
    monkeypatch.setenv("LDC_BUILD", "cpu")
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "this file does not compile" in done.stdout + done.stderr
    assert not list((tmp_path / "lightning_deepcompile").iterdir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel with this build, and with one for a PyTorch that does not exist; unpacked."""
    from lightning_deepcompile import _C

    folder = tmp_path_factory.mktemp("wheel")
    for variant in (THIS, "torch9.9-cpu"):
        (folder / "prebuilt" / variant).mkdir(parents=True)
        shutil.copy2(_C.__file__, folder / "prebuilt" / variant)
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder, "build", "--build-base", folder]
    command += ["bdist_wheel", "--bdist-dir", folder / "temporary", "--dist-dir", folder]
    environment = {**os.environ, "LDC_BUILD": "cpu", "LDC_PREBUILT": str(folder / "prebuilt")}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    assert f"cp{sys.version_info[0]}{sys.version_info[1]}-" in wheel.name and "none-any" not in wheel.name
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


THIS = f"torch{'.'.join(torch.__version__.split('.')[:2])}-cpu"
LOAD = "from lightning_deepcompile.runtime import load_extension; print(load_extension().__file__)"


def _load(site):
    command = [sys.executable, "-c", LOAD]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True)


def test_a_wheel_of_several_builds_loads_the_one_that_fits(wheel):
    ran = _load(wheel)
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.strip()).parent == wheel / "lightning_deepcompile/_C" / THIS


def test_a_wheel_without_a_build_that_fits_says_what_it_holds(wheel, tmp_path):
    shutil.copytree(wheel, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "lightning_deepcompile/_C" / THIS)
    ran = _load(tmp_path)
    said = f"this wheel was built for torch9.9-cpu, and PyTorch is {torch.__version__}"
    assert ran.returncode == 1 and said in ran.stderr.splitlines()[-1], ran.stderr


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ("torch2.1-cuda/_C{own}", "built for torch2.1-cuda, and PyTorch is "),
        ("torch{torch}-cpu/_C.cpython-311-aarch64-linux-gnu.so", "built for cpython-311-aarch64-linux-gnu, and "),
        ("torch{torch}-cpu/_C.cpython-311-x86_64-linux-musl.so", "built for cpython-311-x86_64-linux-musl, and "),
        ("torch{torch}-cpu/_C.cpython-399-x86_64-linux-gnu.so", "built for cpython-399-x86_64-linux-gnu, and "),
    ],
    ids=["torch", "aarch64", "musl", "python"],
)
def test_a_wheel_that_does_not_fit_says_so_in_a_line(held: str, said: str, tmp_path: Path) -> None:
    names = {"own": sysconfig.get_config_var("EXT_SUFFIX"), "torch": ".".join(torch.__version__.split(".")[:2])}
    file = tmp_path / held.format(**names)
    file.parent.mkdir()
    file.touch()
    with pytest.raises(ImportError) as told:
        load_prebuilt("none", str(tmp_path))
    text = str(told.value)
    assert f"this wheel was {said.format(**names)}" in text and "\n" not in text
    if "PyTorch" not in said:
        assert text.endswith(f"this Python is {names['own'].strip('.').removesuffix('.so')}")


def test_a_build_is_named_as_it_is_looked_for_and_one_with_cuda_comes_first(build):
    assert variants("2.13.1+cu130") == ["torch2.13-cuda", "torch2.13-cpu"]
    assert [build.variant(build.BuildPlan(cuda, reason="")) for cuda in (True, False)] == variants(torch.__version__)


def test_folders_of_cpp_files_include_what_comes_before_them():
    source = ROOT / "csrc"
    order = re.findall(r"^- `(\w+)/`", (source / "README.md").read_text(), re.MULTILINE)
    assert set(order) == {path.name for path in source.iterdir() if path.is_dir()}
    for file in [*source.rglob("*.h"), *source.rglob("*.cpp")]:
        for folder in re.findall(r'^#include "(\w+)/', file.read_text(), re.MULTILINE):
            assert order.index(folder) <= order.index(file.parent.name), f"{file} includes a header of {folder}/"
