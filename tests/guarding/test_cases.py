"""Cases: their names and checks, the settings of a project, and the cases that a command selects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_locks import a_case

from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.guarding.cases import Case, case_name, check_case, check_complete, guard_command, make_case
from autoaccum.guarding.guard_result import parse_tolerance
from autoaccum.guarding.project import find_folder, place_within, select_cases


class TestCase:
    def test_a_name_is_what_selects_it(self) -> None:
        case = make_case(workload="train.py:small", gpu="t4", target_batch=256)
        assert case_name(case) == "train.py:small --gpu t4 --target-batch 256"
        assert case_name(make_case(**{**case.to_record(), "ema": False})).endswith(" --no-ema")
        sets = make_case(workload="hf:gpt2", gpu="t4", overrides={"length": "128"})
        assert case_name(sets) == "hf:gpt2 --gpu t4 --set length=128"
        assert make_case(**sets.to_record()) == sets != make_case(workload="hf:gpt2", gpu="t4")
        strange = make_case(workload="a.py --gpu t4", gpu="t4")
        assert case_name(strange) == "'a.py --gpu t4' --gpu t4", "it cannot pass for another case"

    def test_the_command_can_be_pasted_and_shows_what_is_missing(self, tmp_path: Path) -> None:
        command = guard_command(a_case("a b.py"), tmp_path, "--update")
        assert command == "autoaccum guard 'a b.py' --gpu rtx3090 --target-batch 256 --update"
        assert guard_command(Case(), tmp_path) == "autoaccum guard model.py --gpu NAME --target-batch N"
        assert "x" * 5000 in guard_command(a_case("x" * 5000), tmp_path)

    def test_what_means_the_same_is_the_same_case(self) -> None:
        given: dict[str, Any] = {"workload": "train.py", "micro_batch": 8}
        case = make_case(gpu="NVIDIA GeForce RTX 3090", memory=" 20 GiB", ema=True, hold_outputs=True, **given)
        same = make_case(gpu="rtx3090", memory="20GiB", ema=True, hold_outputs=True, **given)
        assert check_case(check_case(case)) == check_case(case) == same

    @pytest.mark.parametrize(
        ("asked", "told"),
        [
            ({"gpu": None}, "no card is given to guard train.py on: name one to simulate"),
            ({"gpu": "rtx3091"}, "there is no 'rtx3091' among the .* did you mean rtx3090"),
            ({"optimizer": ["Adam"]}, r"the optimizer is \['Adam'\]: give a name of torch.optim"),
            ({"target_batch": 0}, "target-batch is 0: give a whole number of at least 1"),
            ({"target_batch": None}, "train.py has no target batch: say how many"),
            ({"micro_batch": 65}, "the micro-batch 65 is more than a rank's share .* 64: give a smaller"),
            ({"workload": ":model"}, "the workload is ':model': write model.py"),
            ({"workload": "a\nb.py"}, r"the name 'a\\nb.py' cannot be written in a lock: rename the file"),
        ],
        ids=lambda value: None if isinstance(value, str) else " ".join(map(str, value.items())),
    )
    def test_what_cannot_be_requested(self, asked: dict[str, Any], told: str) -> None:
        with pytest.raises(UsageError, match=told) as error:
            check_complete(check_case(make_case(**{"workload": "train.py", "gpu": "t4", "target_batch": 64, **asked})))
        assert error.value.hint


def test_the_nearest_lock_counts_then_the_folder_itself(tmp_path: Path) -> None:
    (deep := tmp_path / "sub/deep").mkdir(parents=True)
    assert find_folder(deep) == deep
    (tmp_path / "autoaccum.lock").write_text("")
    assert find_folder(deep) == tmp_path


def test_a_path_is_known_by_its_place_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "sub/deep").mkdir(parents=True)
    for cwd, written, known in (
        (tmp_path, "./a.py", "a.py"),
        (tmp_path / "sub", "../a.py:name", "a.py:name"),
        (tmp_path / "sub/deep", str(tmp_path / "a.py"), "a.py"),
        (tmp_path, "sub//deep/../a.py", "sub/a.py"),
    ):
        assert place_within(tmp_path, written, cwd) == known
    (tmp_path / "link").symlink_to(tmp_path / "sub")
    assert place_within(tmp_path, "link/real.py", tmp_path) == "sub/real.py"
    with pytest.raises(UsageError, match=r"\.\./a\.py lies outside of .*, the folder of the lock: guard it from"):
        place_within(tmp_path, "../a.py", tmp_path)


SMALL = a_case(target_batch=16)
OTHER = a_case("other.py", gpu="a100-80gb", precision="bf16")
KNOWN = (OTHER, a_case(), SMALL, a_case())


class TestSelection:
    @pytest.fixture
    def project(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "train.py").touch()
        return tmp_path

    def select(self, project: Path, *gpus: str, **asked: Any) -> tuple[Case, ...]:
        return select_cases([make_case(gpu=gpu, **asked) for gpu in gpus or (None,)], project, KNOWN)

    def test_what_is_requested_filters_what_is_known_by_name_and_once(self, project: Path) -> None:
        assert self.select(project) == (OTHER, SMALL, a_case())
        assert self.select(project, workload="train.py") == (SMALL, a_case())
        assert self.select(project, "A100-80GB") == (OTHER,)
        assert self.select(project, precision="bf16") == (OTHER,)

    def test_with_a_size_it_is_that_very_case_on_each_card(self, project: Path) -> None:
        found = self.select(project, "A100-80GB", "RTX 3090", "rtx3090", workload="train.py", target_batch=8)
        assert found == (a_case(gpu="a100-80gb", target_batch=8), a_case(target_batch=8))
        assert self.select(project, workload="train.py", target_batch=16) == (SMALL,), "on the cards that are known"

    def test_a_card_without_a_case_is_no_pass_next_to_one_that_has(self, project: Path) -> None:
        missing = r"no case of train.py on T4 .*: lock it by `autoaccum guard train.py --gpu t4 --target-batch N --upd"
        with pytest.raises(NotMeasuredError, match=missing):
            self.select(project, "RTX 3090", "T4", workload="train.py")
        with pytest.raises(NotMeasuredError, match="no case of train.py in the lock"):
            self.select(project, workload="train.py", precision="bf16")

    def test_what_does_not_go_together_is_refused(self, project: Path) -> None:
        with pytest.raises(UsageError, match="no card is given"):
            self.select(project, workload="train.py", target_batch=8)
        with pytest.raises(UsageError, match="without a workload"):
            self.select(project, target_batch=8)
        with pytest.raises(UsageError, match="rtx9999"):
            self.select(project, "rtx9999")

    def test_a_file_is_named_from_the_current_folder(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        inside = project / "deep" / "er"
        inside.mkdir(parents=True)
        monkeypatch.chdir(inside)
        assert self.select(project, workload="../../train.py") == (SMALL, a_case())
        assert guard_command(a_case(), project).split()[:3] == ["autoaccum", "guard", "../../train.py"]


@pytest.mark.parametrize("text", ["", "1", "101%", "5 MiBs", "%", 0.01])
def test_what_is_no_tolerance_is_refused_with_a_way_out(text: Any) -> None:
    with pytest.raises(UsageError, match="neither a share up to 100% nor a size: write such as 1%, 0.5% or 50MiB$"):
        parse_tolerance(text)
