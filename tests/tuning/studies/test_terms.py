from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import optuna
import pytest
from small_studies import RATES, small_space, small_study, small_terms
from small_tunings import plan, setting

from autoaccum.errors import StudyError, UsageError
from autoaccum.planning.shapes import thaw
from autoaccum.tuning.records import Speed, Throughput
from autoaccum.tuning.settings import BatchSpan, Budget, RateSpan
from autoaccum.tuning.studies.attributes import MEASURED, TERMS
from autoaccum.tuning.studies.storage import Storage, open_storage
from autoaccum.tuning.studies.study import Study, open_study
from autoaccum.tuning.studies.terms import Terms

THROUGHPUT_OF_TWO = Throughput(
    target_batch=256,
    device="cpu",
    speeds=(
        Speed(micro_batch=64, iter_size=4, state="measured", samples_per_second=1.5, low=1.25, high=2.0, updates=5),
        Speed(micro_batch=128, iter_size=2, state="out_of_memory"),
    ),
    fastest=64,
    knee=64,
)
KEPT = plan(setting(0.1)).to_json()
OTHERS: dict[str, Any] = {
    "workload": "hill",
    "digest": "cd" * 32,
    "learning_rates": RateSpan(1e-3, 1.0),
    "target_batches": BatchSpan(64, 1024),
    "budget": Budget(10, "seconds"),
    "seed": 1,
    "sampler": "random",
    "pruner": "none",
    "precision": "bf16",
    "batchnorm": "frozen",
    "optimizer": "Adam",
    "held_out": "other data",
    "device": "NVIDIA H100",
}


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "tune.journal"), heartbeat=20.0)


def optuna_study(storage: Storage, name: str = "valley") -> optuna.Study:
    return optuna.load_study(study_name=name, storage=storage.backend)


def test_a_study_is_gone_on_with_on_the_same_terms(storage: Storage) -> None:
    first = open_study(storage, "valley", small_terms())
    second = open_study(storage, "valley", small_terms())
    assert (first.name, first.finished) == (second.name, second.finished) == ("valley", 0)
    assert (first.sampler_words, first.pruner_words) == (second.sampler_words, second.pruner_words)
    assert optuna_study(storage).user_attrs[TERMS] == small_terms().to_record()


def test_each_other_term_is_named_and_the_study_stays(storage: Storage, tmp_path: Path) -> None:
    assert OTHERS.keys() | {"schema"} == {field.name for field in dataclasses.fields(Terms)}
    open_study(storage, "valley", small_terms())
    before = (tmp_path / "tune.journal").read_bytes()
    for name, value in OTHERS.items():
        with pytest.raises(UsageError, match="was made with other terms") as error:
            open_study(storage, "valley", dataclasses.replace(small_terms(), **{name: value}))
        assert error.value.message.count(", now ") == 1
        assert "--study" in str(error.value)
    after = (tmp_path / "tune.journal").read_bytes()
    tried = [line for line in after[len(before) :].splitlines() if b'"op_code":0' not in line]
    assert tried == [], "nothing but studies that were not made, since they were there"
    assert optuna_study(storage).user_attrs == {TERMS: small_terms().to_record()}


def test_differing_terms_are_shown_as_they_were_and_are(storage: Storage) -> None:
    open_study(storage, "valley", small_terms())
    asked = dataclasses.replace(small_terms(), budget=Budget(2.5, "seconds"), target_batches=BatchSpan(64, 1024))
    with pytest.raises(UsageError) as error:
        open_study(storage, "valley", asked)
    assert "(target batches 256, now 64..1024; budget 1000 samples, now 2.5 seconds)" in error.value.message


@pytest.mark.parametrize("attributes", [{"autoaccum": "mine"}, {"autoaccum": {"schema": 1}}, {"other": 1}])
def test_a_study_of_somebody_else_is_refused_and_stays(storage: Storage, attributes: dict[str, Any]) -> None:
    foreign = optuna.create_study(storage=storage.backend, study_name="valley")
    for name, value in attributes.items():
        foreign.set_user_attr(name, value)
    with pytest.raises(UsageError, match="the study 'valley' is"):
        open_study(storage, "valley", small_terms())
    assert optuna_study(storage).user_attrs == attributes


def test_a_study_of_somebody_else_without_attributes_is_known_by_its_trials(storage: Storage) -> None:
    optuna.create_study(storage=storage.backend, study_name="valley").ask()
    with pytest.raises(UsageError, match="not of autoaccum"):
        open_study(storage, "valley", small_terms())
    assert optuna_study(storage).user_attrs == {}


def test_an_empty_study_whose_maker_was_killed_is_taken_over(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoaccum.tuning.studies.study._PATIENCE_SECONDS", 0.0)
    optuna.create_study(storage=storage.backend, study_name="valley")
    assert open_study(storage, "valley", small_terms()).finished == 0
    assert optuna_study(storage).user_attrs == {TERMS: small_terms().to_record()}


def test_a_newer_study_and_one_that_maximises_are_refused(storage: Storage) -> None:
    newer = optuna.create_study(storage=storage.backend, study_name="valley")
    newer.set_user_attr(TERMS, {**small_terms().to_record(), "schema": 2})
    with pytest.raises(UsageError, match="by a newer autoaccum"):
        open_study(storage, "valley", small_terms())
    upward = optuna.create_study(storage=storage.backend, study_name="hill", direction="maximize")
    upward.set_user_attr(TERMS, small_terms().to_record())
    with pytest.raises(UsageError, match="is there already"):
        open_study(storage, "hill", small_terms())


def test_confirmations_are_not_put_into_a_study_of_somebody_else(storage: Storage) -> None:
    study = open_study(storage, "valley", small_terms())
    optuna.create_study(storage=storage.backend, study_name="valley, confirmed").set_user_attr("a", 1)
    with pytest.raises(UsageError, match="'valley, confirmed' is there already"):
        study.confirmation_line()


def test_workers_that_start_at_once_make_one_study(tmp_path: Path) -> None:
    for ending in ("db", "journal"):
        where, barrier = tmp_path / f"tune.{ending}", threading.Barrier(4)
        made: list[Study] = []

        def start(where: Path = where, made: list[Study] = made, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            made.append(small_study(where))

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [study.name for study in made] == ["valley"] * 4
        assert [one.study_name for one in optuna.get_all_study_summaries(made[0].storage.backend)] == ["valley"]
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_plan_and_throughput_are_kept_once_and_come_back_equal(storage: Storage) -> None:
    study = open_study(storage, "valley", small_terms())
    assert (study.recall_plan(), study.recall_throughput()) == (None, None)
    first, second = plan(setting(0.1)), plan(setting(0.1, micro_batch=32))
    assert study.settle(first, THROUGHPUT_OF_TWO) == (first, THROUGHPUT_OF_TWO)
    late = dataclasses.replace(THROUGHPUT_OF_TWO, device="other")
    assert study.settle(second, late) == (first, THROUGHPUT_OF_TWO)
    again = open_study(storage, "valley", small_terms())
    assert (again.recall_plan(), again.recall_throughput()) == (first, THROUGHPUT_OF_TWO)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"plan": '{"schema": 1'}, "is not valid JSON"),
        ({"throughput": {"target_batch": 256}}, "the plan of the study"),
        ("fast", "plan and throughput are no record"),
        ({"plan": KEPT, "throughput": "fast"}, "the throughput is no record"),
        ({"plan": KEPT, "throughput": {"target_batch": 256}}, "'device' is missing"),
    ],
)
def test_what_is_damaged_is_named(storage: Storage, value: Any, said: str) -> None:
    study = open_study(storage, "valley", small_terms())
    optuna_study(storage).set_user_attr(MEASURED, value)
    with pytest.raises(StudyError, match="the study 'valley' in .* is damaged") as error:
        study.settle(plan(setting(0.1)), THROUGHPUT_OF_TWO)
    assert said in error.value.message


@pytest.mark.parametrize("ending", ["db", "journal"])
def test_workers_that_measured_at_once_go_by_the_same(tmp_path: Path, ending: str) -> None:
    """One made the study, the others found it without a plan; each comes with its own."""
    studies = [small_study(tmp_path / f"tune.{ending}") for _ in range(3)]
    plans = [plan(setting(0.1, micro_batch=size)) for size in (16, 32, 64)]
    settled: list[Any] = []
    barrier = threading.Barrier(3)

    def settle(number: int) -> None:
        barrier.wait()
        settled.append(studies[number].settle(plans[number], THROUGHPUT_OF_TWO))

    threads = [threading.Thread(target=settle, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [study.is_maker for study in studies] == [True, False, False]
    assert settled == [(plans[0], THROUGHPUT_OF_TWO)] * 3


def test_what_the_maker_did_not_live_to_keep_another_one_keeps(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that do so at once, both go by what was written last."""
    monkeypatch.setattr("autoaccum.tuning.studies.study._PATIENCE_SECONDS", 0.0)
    open_study(storage, "valley", small_terms())
    second = open_study(storage, "valley", small_terms())
    last = {"plan": plan(setting(0.1, micro_batch=32)).to_json(), "throughput": thaw(THROUGHPUT_OF_TWO)}
    monkeypatch.setattr(
        "autoaccum.tuning.studies.study.time.sleep", lambda seconds: optuna_study(storage).set_user_attr(MEASURED, last)
    )
    kept, _ = second.settle(plan(setting(0.1)), THROUGHPUT_OF_TWO)
    assert kept == plan(setting(0.1, micro_batch=32))


def test_a_key_that_our_own_code_lacks_is_no_trouble_of_the_storage(storage: Storage) -> None:
    study = open_study(storage, "valley", small_terms())
    empty: dict[str, int] = {}
    with pytest.raises(KeyError), study.reaching():
        empty["rate"]


def test_a_small_study_searches_what_its_terms_say() -> None:
    assert small_space().learning_rates == small_terms().learning_rates == RATES
