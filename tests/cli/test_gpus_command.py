from __future__ import annotations

import json

from command_line import invoke

from autoaccum.simulation.cards import all_cards


def test_all_cards_are_listed_within_80_columns() -> None:
    result = invoke("gpus", env={"COLUMNS": "80"})
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["name", "card", "GiB", "CC", "SMs"]
    cells = [line.split() for line in lines]
    assert ["rtx3090", "GeForce", "RTX", "3090", "23.56", "8.6", "82"] in cells
    assert any(row[:1] == ["l40"] and "~44.40" in row for row in cells), "estimated"
    assert "memory:" not in result.stdout
    assert not any(line != line.rstrip() for line in lines)
    assert {card.name for card in all_cards()} <= {line.split(" ")[0] for line in lines}
    assert "autoaccum plan WORKLOAD --target-batch N --gpu NAME" in result.stdout


def test_json_is_a_list_of_records_and_nothing_else() -> None:
    result = invoke("gpus", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    records = {record["name"]: record for record in json.loads(result.stdout)}
    assert len(records) == len(all_cards())
    known = {"title": "NVIDIA GeForce RTX 3090", "total_bytes": 24124 * 2**20, "capability": [8, 6], "measured": True}
    known |= {"multiprocessors": 82, "architecture": "Ampere"}
    assert {name: records["rtx3090"][name] for name in known} == known
    assert all(record["source"] and record["context"]["bytes"] and record["rates"] for record in records.values())


def test_a_name_leaves_the_cards_that_have_it_and_tells_their_sources() -> None:
    result = invoke("gpus", "a100", env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "a100-40gb " in result.stdout
    assert "a100-80gb " in result.stdout
    assert "rtx3090" not in result.stdout
    assert "memory: printed by get_device_properties in public logs" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
