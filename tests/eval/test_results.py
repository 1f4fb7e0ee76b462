"""The file of results: whole lines, found again, mended where it was cut."""

from __future__ import annotations

import json
import os
import resource

import pytest

from kvframe.errors import InputError
from kvframe.eval import open_results
from kvframe.eval.results import KEY


def record(**changes):
    return {**dict.fromkeys(KEY, "x"), "versions": {"b": 1, "a": 2}, "score": 0.5, **changes}


def test_what_was_written_is_found_again(tmp_path):
    results = open_results(tmp_path / "new" / "folder")
    results.append(record(example=1))
    results.append(record(example=2, score=0.7))
    again = open_results(tmp_path / "new" / "folder")
    assert len(again) == 2
    assert again.find(record(example=2, score=None))["score"] == 0.7
    assert again.find(record(example=3)) is None
    assert again.find(record(example=1, versions={"a": 2, "b": 1})) is not None
    assert again.notes == []


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_cut_off_line_is_dropped(tmp_path, cut):
    results = open_results(tmp_path)
    results.append(record(example=1))
    results.append(record(example="zwei – двa"))
    data = results.path.read_bytes()
    results.path.write_bytes(data[:-cut])
    again = open_results(tmp_path)
    assert len(again) == 1
    assert "cut off" in again.notes[0]
    again.append(record(example=3))
    assert [json.loads(line)["example"] for line in results.path.read_text().splitlines()] == [1, 3]


@pytest.mark.parametrize("line", ["no json", "[1, 2]", '{"task": "niah"}', "3"])
def test_a_foreign_file_is_left_alone(tmp_path, line):
    (tmp_path / "results.jsonl").write_text(f"{json.dumps(record())}\n{line}\n")
    with pytest.raises(InputError, match=r"results\.jsonl:2: this line is no result"):
        open_results(tmp_path)
    assert line in (tmp_path / "results.jsonl").read_text()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be written"):
        open_results(tmp_path / "file")
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(InputError, match="Permission denied"):
            open_results(tmp_path / "locked")


def test_a_disk_without_room_is_said_and_nothing_is_lost(tmp_path):
    results = open_results(tmp_path)
    results.append(record(example=1))
    before = results.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Room for a part of the next line, which the system writes without an error.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        with pytest.raises(InputError, match="cannot be written"):
            results.append(record(example=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert results.path.read_bytes() == before
    results.append(record(example=2))
    assert len(open_results(tmp_path)) == 2
