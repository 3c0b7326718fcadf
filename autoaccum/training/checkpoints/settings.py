"""What an optimizer and its schedule were set to when a training was built, and what was set anew since."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from autoaccum.errors import AutoaccumError
from autoaccum.training.checkpoints.contents import portable

_PLAIN = (bool, int, float, str, type(None))
_NOT_SET = ("params", "param_names")
_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
_CYCLED = ("momentum", "betas")
_WITH_STATE = ("amsgrad", "centered")
"""Settings that ask for state of every parameter, which an optimizer makes before its first update only."""

_OF_PLACE = ("base_lrs", "last_epoch")
_INNER = ("_schedulers", "_milestones")


@dataclass
class Settings:
    """Taken before any update.

    Attributes:
        groups: Of each parameter group.
        schedule: What the scheduler kept; None where there is none, or it keeps what no file can hold.
    """

    groups: list[dict[str, Any]]
    schedule: dict[str, Any] | None

    @classmethod
    def of(cls, optimizer: Optimizer, scheduler: Any | None) -> Settings:
        """Those that are set now."""
        return cls([_of_group(group) for group in optimizer.param_groups], _of_scheduler(scheduler))

    def state(self) -> dict[str, Any]:
        """As plain values and tensors."""
        return {"groups": self.groups, "schedule": self.schedule}

    def merge(
        self,
        kept: Mapping[str, Any],
        state: Mapping[str, Any],
        optimizer: Optimizer,
        scheduler: Any | None,
        place: Mapping[str, Any] | None,
    ) -> tuple[dict[str, Any], list[str]]:
        """Have what was set anew win over a checkpoint, but for what a schedule sets: that goes on as it was kept.

        Args:
            kept: The `state` of the checkpoint; what is not used of here becomes as it was there.
            state: Of the optimizer, from the checkpoint.
            optimizer: As it is built here.
            scheduler: The same.
            place: Of the scheduler, from the checkpoint, below `state`.

        Returns:
            The optimizer's state to load, and what is different from here on, as parts of a sentence.
        """
        groups = [dict(group) for group in state["param_groups"]]
        changes: dict[str, list[int]] = {}
        unused: list[str] = []
        for number, (old, new, group) in enumerate(zip(kept["groups"], self.groups, groups, strict=False)):
            scheduled = () if scheduler is None else _scheduled(group)
            for key in _changed(old, new, group):
                if key in scheduled:
                    if not (key == "lr" and "initial_lr" in new):  # What it begins with was given, the other follows.
                        unused.append(f"{key.removeprefix('initial_')}={_shown(new[key])}")
                elif state["state"] and _lacks_state(optimizer, key, old[key]):
                    changes.setdefault(f"{key} stays {_shown(old[key])}: it has no state to go on from", []).append(
                        number
                    )
                    new[key] = old[key]
                else:
                    told = f"{key} is {_shown(new[key])} from here on (it was {_shown(_plain(group[key]))})"
                    changes.setdefault(told, []).append(number)
                    group[key] = optimizer.param_groups[number][key]
            new.update({key: old[key] for key in scheduled if key in old})
        if scheduler is not None and place is not None:
            unused += _unused_of(kept["schedule"], self.schedule, _of_state(place["state"]))
            self.schedule = kept["schedule"]
        return {**state, "param_groups": groups}, _told(changes, len(groups), list(dict.fromkeys(unused)))


def _of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: _plain(value) for key, value in group.items() if key not in _NOT_SET}
    return {key: value for key, value in plain.items() if _is_plain(value)}


def _of_scheduler(scheduler: Any | None) -> dict[str, Any] | None:
    return None if scheduler is None or not hasattr(scheduler, "state_dict") else _of_state(scheduler.state_dict())


def _of_state(state: Any) -> dict[str, Any] | None:
    try:
        taken: dict[str, Any] = copy.deepcopy(portable(dict(state)))
    except (AutoaccumError, TypeError, ValueError):
        return None
    return taken


def _plain(value: Any) -> Any:
    is_number = isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1)
    return value.item() if is_number else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _changed(old: Mapping[str, Any], new: dict[str, Any], group: Mapping[str, Any]) -> list[str]:
    """What was set anew; not what training itself has set so since, as in an optimizer that is given a second time."""
    different = [key for key in new if key in old and key in group and new[key] != old[key]]
    already = [key for key in different if new[key] == _plain(group[key])]
    new.update({key: old[key] for key in already})
    return [key for key in different if key not in already]


def _scheduled(group: Mapping[str, Any]) -> tuple[str, ...]:
    return (*_RATES, *_CYCLED) if "max_momentum" in group else _RATES


def _lacks_state(optimizer: Optimizer, key: str, old: Any) -> bool:
    return not old and (key in _WITH_STATE or (key == "momentum" and type(optimizer).__name__ == "RMSprop"))


def _unused_of(kept: Any, new: Any, place: Any) -> list[str]:
    """What differs in a scheduler that was built with other settings: of those that have a name, with their value."""
    theirs, ours, now = (dict(_leaves(state, ())) for state in (kept, new, place))
    names = [path for path, value in ours.items() if path[0] in (kept or {}) and _differs(path, value, theirs, now)]
    return [f"{path[-1].removeprefix('_')}={_shown(ours[path])}" for path in names if _has_name(path)]


def _differs(path: tuple[Any, ...], value: Any, *others: Mapping[Any, Any]) -> bool:
    return all(path not in other or other[path] != value for other in others)


def _has_name(path: tuple[Any, ...]) -> bool:
    hidden = any(isinstance(part, str) and part.startswith("_") and part not in _INNER for part in path)
    return not hidden and isinstance(path[-1], str) and path[-1] not in _OF_PLACE


def _leaves(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Plain values by their path; a list of them is one, in the words of its entries."""
    if isinstance(node, Mapping) and all(isinstance(key, str) for key in node):
        for key, value in node.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(node, Mapping):
        yield path, sorted(node)
    elif isinstance(node, list | tuple) and not _is_plain(node):
        for number, value in enumerate(node):
            yield from _leaves(value, (*path, number))
    elif _is_plain(node):
        yield path, list(node) if isinstance(node, tuple) else node


def _told(changes: Mapping[str, list[int]], groups: int, unused: list[str]) -> list[str]:
    said = []
    for change, numbers in changes.items():
        where = "" if len(numbers) == groups else f" in parameter group {', '.join(map(str, numbers))}"
        said.append(f"{change}{where}")
    if unused:
        verb = "is" if len(unused) == 1 else "are"
        said.append(f"the schedule goes on: {', '.join(unused)} that {verb} given now {verb} not used")
    return said


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
