from __future__ import annotations

from importlib import metadata

import pytest

from autoaccum.devices import environment
from autoaccum.devices.environment import read_torch_release
from autoaccum.errors import UsageError


@pytest.mark.parametrize(
    ("version", "release"), [("2.11.0", (2, 11)), ("2.15.0+cu132", (2, 15)), ("3.0.0a0+git1", (3, 0))]
)
def test_reads_what_is_installed(monkeypatch: pytest.MonkeyPatch, version: str, release: tuple[int, int]) -> None:
    monkeypatch.setattr(environment, "version", lambda name: version)
    assert read_torch_release() == release


def test_an_older_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "version", lambda name: "2.6.0+cu124")
    with pytest.raises(UsageError, match=r"needs torch 2.11 or newer, torch here is 2.6.0\+cu124: upgrade torch"):
        read_torch_release()


def test_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environment, "version", missing)
    with pytest.raises(UsageError, match="torch here is not installed"):
        read_torch_release()
