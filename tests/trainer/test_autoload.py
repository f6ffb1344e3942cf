"""Lightning finds the strategy by name. Each case needs a fresh interpreter, as the order of imports matters."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from interpreters import ROOT, clean_environment, declare_entry_points, run_python

NAMES = [
    "deepcompile",
    "deepcompile_stage_1",
    "deepcompile_stage_2",
    "deepcompile_stage_3",
    "deepcompilestrategy",
    "lightning_deepcompile.deepcompilestrategy",
]

HIDE_LIGHTNING = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lightning":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def run(code: str, *options: str, **settings: Any) -> str:
    return run_python(*options, "-c", code, **settings)


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that declares the entry points as an installation would."""
    return declare_entry_points(tmp_path_factory.mktemp("metadata"))


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a package that looks like Lightning to an importer, and needs no torch."""
    package = tmp_path / "lightning" / "pytorch" / "strategies"
    package.mkdir(parents=True)
    for folder in (package.parent.parent, package.parent):
        (folder / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "class Registry(dict):\n"
        "    def register(self, name, strategy=None, description=None, override=False, **parameters):\n"
        "        self[name] = parameters\n"
        "StrategyRegistry = Registry()\n"
    )
    return tmp_path


def test_trainer_resolves_the_name_without_an_import_of_the_package(metadata: Path) -> None:
    run(
        "import sys, torch\n"
        "assert 'lightning' not in sys.modules\n"
        "assert {m for m in sys.modules if m.startswith('lightning_d')} == "
        "{'lightning_deepcompile', 'lightning_deepcompile._autoload', 'lightning_deepcompile_autoload'}\n"
        "from lightning.pytorch import Trainer\n"
        "assert 'lightning_deepcompile.trainer.strategy' not in sys.modules\n"
        f"for name in {NAMES}:\n"
        "    trainer = Trainer(strategy=name, accelerator='cpu', devices=1, logger=False)\n"
        "    assert type(trainer.strategy).__name__ == 'DeepCompileStrategy', trainer.strategy\n"
        "    assert trainer.strategy.stage == int(name[-1] if name[-1].isdigit() else 3)\n",
        paths=(metadata,),
    )


def test_lightning_cli_takes_names_class_paths_and_settings(metadata: Path) -> None:
    pytest.importorskip("jsonargparse")
    run(
        "from lightning.pytorch.cli import LightningCLI\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "def strategy(*args):\n"
        "    common = ['--trainer.accelerator=cpu', '--trainer.devices=1', '--trainer.logger=false']\n"
        "    cli = LightningCLI(BoringModel, run=False, args=[*common, *args], save_config_callback=None)\n"
        "    assert 'DeepCompileStrategy' in [kind.__name__ for kind in type(cli.trainer.strategy).__mro__]\n"
        "    return cli.trainer.strategy\n"
        "path = 'lightning_deepcompile.DeepCompileStrategy'\n"
        "strategy('--trainer.strategy=deepcompile')\n"
        "strategy(f'--trainer.strategy={path}')\n"
        "for name in (path, 'DeepCompileStrategy', 'deepcompile'):\n"
        "    settings = ['--trainer.strategy.compile.memory_budget', '24GiB', '--trainer.strategy.stage', '2']\n"
        "    made = strategy('--trainer.strategy', name, *settings)\n"
        "    assert made.compile.memory_budget == '24GiB' and made.stage == 2\n",
        paths=(metadata,),
    )


def test_torch_imports_where_lightning_is_absent(metadata: Path) -> None:
    printed = run(HIDE_LIGHTNING + "import torch; print(torch.ones(1).item())", "-W", "error", paths=(metadata,))
    assert printed == "1.0\n"


def test_without_autoload_importing_the_package_registers(metadata: Path) -> None:
    run(
        "from lightning.pytorch import Trainer\n"
        "make = lambda: Trainer(strategy='deepcompile', accelerator='cpu', devices=1, logger=False)\n"
        "try:\n"
        "    make()\n"
        "except ValueError as error:\n"
        "    assert 'deepcompile' in str(error)\n"
        "else:\n"
        "    raise AssertionError('known already')\n"
        "import lightning_deepcompile\n"
        "make()\n",
        paths=(metadata,),
        autoload=False,
    )


def test_who_cannot_run_the_strategies_says_who_can(metadata: Path) -> None:
    """One interpreter imports all packages: each has a registry of its own."""
    trainer, fabric = "from lightning.pytorch import Trainer", "lightning.pytorch.Trainer(strategy='deepcompile')"
    cases = [("pytorch_lightning", "Trainer", trainer), ("lightning.fabric", "Fabric", fabric)]
    cases += [("lightning_fabric", "Fabric", fabric)]
    present = [case for case in cases if importlib.util.find_spec(case[0])]
    assert present
    run(
        "import importlib\n"
        f"for package, call, remedy in {present!r}:\n"
        "    cls = getattr(importlib.import_module(package), call)\n"
        "    try:\n"
        "        cls(strategy='deepcompile', accelerator='cpu', devices=1)\n"
        "    except ImportError as error:\n"
        "        assert call + '(strategy=' + repr('deepcompile') + ')' in str(error), error\n"
        "        assert remedy in str(error) and len(str(error).splitlines()) == 1, error\n"
        "    else:\n"
        "        raise AssertionError(f'{package} accepted it')\n",
        paths=(metadata,),
    )


def test_the_other_lightning_alone_says_what_to_install(stand_in: Path) -> None:
    (stand_in / "lightning" / "pytorch").rename(stand_in / "pytorch_lightning")
    run(
        HIDE_LIGHTNING + "import lightning_deepcompile\n"
        "from pytorch_lightning.strategies import StrategyRegistry as registry\n"
        "assert list(registry) == list(lightning_deepcompile.registry.STRATEGIES)\n",
        paths=(stand_in,),
    )


@pytest.mark.parametrize(("shadowed", "options"), [(False, ()), (True, ("-W", "error"))])
def test_torch_imports_where_the_package_does_not(tmp_path: Path, shadowed: bool, options: tuple[str, ...]) -> None:
    """An editable install whose checkout was moved, or a file of the user's with the package's name, cause this."""
    declare_entry_points(tmp_path)
    shutil.copy(ROOT / "lightning_deepcompile_autoload.py", tmp_path)
    if shadowed:
        (tmp_path / "lightning_deepcompile.py").write_text("raise ValueError('not the package')\n")
    env = {name: value for name, value in clean_environment().items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    # Only torch's own folder and `tmp_path`: neither this checkout nor an installation of it.
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
        "import torch; print(torch.ones(1).item())\n"
    )
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, env=env | {"PYTHONPATH": ""}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "1.0\n", done.stderr
    reason = "ValueError: not the package" if shadowed else "ModuleNotFoundError: No module named"
    assert done.stderr.count("installed but cannot be imported") == 1 and reason in done.stderr, done.stderr


@pytest.mark.parametrize("order", ["package first", "lightning first"])
def test_registers_once_in_either_order_of_imports(stand_in: Path, order: str) -> None:
    lines = ["import lightning_deepcompile", "from lightning.pytorch import strategies"]
    lines = lines if order == "package first" else lines[::-1]
    run(
        "\n".join(lines) + "\n"
        "import importlib, sys\n"
        "from lightning_deepcompile._autoload import _Finder, install\n"
        "install()\n"
        "assert sum(isinstance(finder, _Finder) for finder in sys.meta_path) == 1\n"
        f"assert list(strategies.StrategyRegistry) == {NAMES}\n"
        "assert 'torch' not in sys.modules\n"
        # The module is as it would be without us, and stays registered when it is executed again.
        "assert type(strategies.__loader__).__name__ == 'SourceFileLoader'\n"
        "assert strategies.__spec__.loader is strategies.__loader__\n"
        "assert 'deepcompile' in importlib.reload(strategies).StrategyRegistry\n",
        paths=(stand_in,),
    )


def test_import_hooks_of_others_that_ask_all_finders(stand_in: Path) -> None:
    run(
        "import importlib.util, sys\n"
        "class Hook:\n"
        "    busy = False\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if self.busy: return None\n"
        "        self.busy = True\n"
        "        try: return importlib.util.find_spec(name)\n"
        "        finally: self.busy = False\n"
        "sys.meta_path.insert(0, Hook())\n"
        "import lightning_deepcompile\n"
        "sys.meta_path.insert(0, Hook())\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        f"assert list(StrategyRegistry) == {NAMES}\n",
        paths=(stand_in,),
    )


@pytest.mark.parametrize("options", [(), ("-W", "error")])
def test_a_registry_that_changed_leaves_lightning_usable(stand_in: Path, options: tuple[str, ...]) -> None:
    (stand_in / "lightning" / "pytorch" / "strategies" / "__init__.py").write_text("StrategyRegistry = object()\n")
    code = "import lightning_deepcompile, lightning.pytorch.strategies\n"
    assert "register" in run(code, *options, paths=(stand_in,))
