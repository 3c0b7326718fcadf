"""Models of transformers that are loaded onto the simulated card, by the threads of its loader."""

from __future__ import annotations

from pathlib import Path

from tiny_transformers import llama

from autoaccum.devices.child.failures import Failure
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.simulated.simulated_child import SimulatedChild
from autoaccum.devices.simulated.simulation_requests import LoadOnCard, TraceParts
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.trace_records import Trace

LOADED = """
import torch
from transformers import LlamaForCausalLM

def model():
    return LlamaForCausalLM.from_pretrained({folder!r}{how})

def batch(n):
    ids = torch.randint(0, 30, (n, 8))
    return {{"input_ids": ids, "labels": ids}}

def loss(model, batch):
    return model(**batch).loss
"""


def trace(path: Path) -> Trace | Failure:
    child, card = SimulatedChild(), find_card("rtx3090")
    try:
        child.handle(LoadOnCard(card=card, device="", paths=ImportPaths.of(), reference=str(path), share=8, options={}))
        made: Trace | Failure = child.handle(TraceParts(parts=(2, 2)))
    finally:
        child.close()
    return made


def test_a_checkpoint_that_is_loaded_onto_the_card_takes_as_much_there(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "llama")
    traced = []
    for how in ("", ', device_map={"": 0}'):
        (path := tmp_path / "model.py").write_text(LOADED.format(folder=str(tmp_path / "llama"), how=how))
        traced.append(trace(path))
    moved, loaded = traced
    assert isinstance(moved, Trace), moved
    assert isinstance(loaded, Trace), loaded
    of_update = [[size for size in each.sizes[-100:] if isinstance(size, int)] for each in (moved, loaded)]
    assert of_update[0] == of_update[1]
