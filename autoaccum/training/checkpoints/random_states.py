"""Random states as plain values: what a checkpoint can hold, and loads without running code."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from autoaccum.accumulation.planned import unwrapped
from autoaccum.accumulation.randomness import (
    GENERATORS,
    Generator,
    device_state,
    has_known_state,
    set_device_state,
)
from autoaccum.errors import first_line

_KINDS = {
    random.Random: "python",
    torch.Generator: "torch",
    np.random.Generator: "numpy",
    np.random.RandomState: "numpy",
}


def capture(devices: Iterable[torch.device], generators: Mapping[str, Generator]) -> dict[str, Any]:
    """The state of Python's and NumPy's (where loaded) generators, torch's on the CPU and `devices`, and `generators`.

    Everything in it is a dict, list, number, string, None or tensor on the CPU, so that `torch.load` takes it with
    `weights_only=True`; NumPy's own tuple it does not.
    """
    numpy_random = sys.modules.get("numpy.random")
    return {
        "python": _python_state(random.getstate()),
        "numpy": None if numpy_random is None else _plain(numpy_random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "devices": [{"device": str(device), "state": device_state(device).cpu()} for device in _cards(devices)],
        "generators": {name: _captured(generator) for name, generator in generators.items()},
    }


def restore(
    states: Mapping[str, Any], devices: Iterable[torch.device], generators: Mapping[str, Generator]
) -> list[str]:
    """Put the generators where `states` of `capture` has them.

    Cards are taken in order, whatever their numbers: a training that moves to another card goes on in its place.

    Returns:
        What could not be put back, as sentences; those generators stay as they are.
    """
    return [sentence for put in _puts(states, list(_cards(devices)), generators) if (sentence := put())]


def named_generators(model: nn.Module, companions: Mapping[str, nn.Module]) -> dict[str, Generator]:
    """The generators that modules keep as attributes, by name (`encoder.noise`, `criterion.noise`), each once."""
    found: dict[int, tuple[str, Generator]] = {}
    for prefix, root in (("", unwrapped(model)), *companions.items()):
        for path, module in root.named_modules(prefix=prefix):
            for name, value in vars(module).items():
                if isinstance(value, GENERATORS) and has_known_state(value):
                    found.setdefault(id(value), (f"{path}{'.' if path else ''}{name}", value))
    return dict(found.values())


def _puts(
    states: Mapping[str, Any], devices: list[torch.device], generators: Mapping[str, Generator]
) -> Iterator[Callable[[], str | None]]:
    yield _put("Python's random state", lambda: random.setstate(_python_tuple(states["python"])))
    if states["numpy"] is not None:
        yield _put("NumPy's random state", lambda: np.random.set_state(_unplain(states["numpy"])))
    yield _put("torch's random state", lambda: torch.set_rng_state(states["torch"]))
    kept = states["devices"]
    for entry, device in zip(kept, devices, strict=False):
        yield _put(f"the random state of {entry['device']}", _setter(set_device_state, device, entry["state"]))
    if len(kept) != len(devices):
        yield lambda: f"random states of {_cards_in_words(kept)} are kept, and it trains on {_cards_in_words(devices)}"
    for name, state in states["generators"].items():
        if name in generators:
            yield _put(f"the random state of {name}", _setter(_set, generators[name], state))
    for name in sorted(states["generators"].keys() ^ generators.keys()):
        yield _setter(str, f"no random state of {name} is {'kept' if name in generators else 'asked for'}")


def _put(what: str, put: Callable[[], Any]) -> Callable[[], str | None]:
    def attempt() -> str | None:
        try:
            put()
        except Exception as error:
            return f"{what} could not be put back ({first_line(error) or type(error).__name__})"
        return None

    return attempt


def _setter(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)


def _cards(devices: Iterable[torch.device]) -> Iterator[torch.device]:
    return (device for device in devices if device.type not in ("cpu", "meta"))


def _cards_in_words(cards: list[Any]) -> str:
    return "1 card" if len(cards) == 1 else f"{len(cards)} cards"


def _captured(generator: Generator) -> dict[str, Any]:
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "state": generator.get_state()}
    if isinstance(generator, np.random.Generator):
        return {"kind": "numpy", "state": _plain(generator.bit_generator.state)}
    if isinstance(generator, np.random.RandomState):
        return {"kind": "numpy", "state": _plain(generator.get_state(legacy=False))}
    return {"kind": "python", "state": _python_state(generator.getstate())}


def _set(generator: Generator, captured: Mapping[str, Any]) -> None:
    kind = next(kind for known, kind in _KINDS.items() if isinstance(generator, known))
    if kind != captured["kind"]:
        raise ValueError(f"it is one of {captured['kind']}, here is one of {kind}")
    state = captured["state"]
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _unplain(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_unplain(state))
    else:
        generator.setstate(_python_tuple(state))


def _python_state(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    return {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}


def _python_tuple(state: Mapping[str, Any]) -> tuple[Any, ...]:
    return state["version"], tuple(state["words"].tolist()), state["gauss"]


def _plain(state: Any) -> Any:
    """NumPy's dict with its arrays as integers: a bit generator has them in 32 or 64 bits, without a sign."""
    if isinstance(state, np.ndarray):
        return {"dtype": str(state.dtype), "words": torch.from_numpy(state.astype(np.int64))}
    if isinstance(state, Mapping):
        return {name: _plain(value) for name, value in state.items()}
    return state.item() if isinstance(state, np.generic) else state


def _unplain(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    if "words" in state:
        return state["words"].numpy().astype(state["dtype"])
    return {name: _unplain(value) for name, value in state.items()}
