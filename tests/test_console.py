"""Messages are shown once: by the user's own handlers if there are any, at the level that the user has chosen."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.capture.fallback import Fallbacks
from lightning_deepcompile.console import quieten, show_messages

PACKAGE = logging.getLogger("lightning_deepcompile")
LOG = logging.getLogger("lightning_deepcompile.some.part")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A logger as in a new process whose user has configured nothing."""
    monkeypatch.delenv("DEEPCOMPILE_LOG", raising=False)
    monkeypatch.setattr(PACKAGE, "handlers", [])
    level = PACKAGE.level
    PACKAGE.setLevel(logging.NOTSET)
    yield
    PACKAGE.setLevel(level)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Without the handlers that pytest adds for every test."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


def test_a_message_is_printed_once_whoever_asks(capsys: pytest.CaptureFixture[str]) -> None:
    with alone():
        DeepCompileStrategy()
        show_messages()
        LOG.info("compiled")
        LOG.debug("a program")
        assert capsys.readouterr().err == "deepcompile INFO: compiled\n"
        quieten(rank=1)
        LOG.info("compiled")
        LOG.warning("short of memory")
        assert capsys.readouterr().err == "deepcompile WARNING: short of memory\n"


@pytest.mark.parametrize("name", ["", "lightning_deepcompile"])
def test_a_users_own_handler_gets_it_instead(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_messages()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    with alone():
        logging.getLogger(name).addHandler(handler)
        LOG.info("compiled")
    assert [record.getMessage() for record in records] == ["compiled"] and not capsys.readouterr().err


def test_the_level_is_the_environments_then_the_settings_then_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    PACKAGE.setLevel(logging.ERROR)
    DeepCompileStrategy()
    quieten(rank=1)
    assert PACKAGE.level == logging.ERROR
    DeepCompileStrategy(compile=CompileConfig(log_level="debug"))
    assert PACKAGE.level == logging.DEBUG
    monkeypatch.setenv("DEEPCOMPILE_LOG", "Warning")
    DeepCompileStrategy(compile={"log_level": "debug"})
    assert PACKAGE.level == logging.WARNING
    monkeypatch.setenv("DEEPCOMPILE_LOG", "debgu")
    with pytest.raises(ValueError, match=r"DEEPCOMPILE_LOG='debgu': use one of .*Did you mean 'debug'\?"):
        DeepCompileStrategy()
    assert CompileConfig(log_level="debug") == CompileConfig()  # a module is not sharded anew for it


def test_users_are_told_of_their_own_functions_alone(capsys: pytest.CaptureFixture[str]) -> None:
    show_messages()
    fallbacks = Fallbacks("error", rank=0)  # which these are not
    with alone():
        for folder in ("lightning_deepcompile/ranks", "lightning/pytorch/profilers"):
            fallbacks.add("read", f"/site-packages/{folder}/some.py:3", "compiled more than 16 times: x == 3")
    assert not capsys.readouterr().err and not fallbacks.reasons
    with pytest.raises(RuntimeError, match="`forward` .* cannot be compiled"):
        fallbacks.add("forward", "/home/me/model.py:3", "it draws")
