"""The comparison on a tiny model: what is measured, how a run goes on, what a failure leaves."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvframe.errors import InputError
from kvframe.eval import Settings, compare, make_contenders, markdown, open_results, print_table
from kvframe.eval.compare import checkpoint_hash
from kvframe.eval.measure import Runner, observe, run_compressed, run_reference
from kvframe.eval.results import KEY
from kvframe.eval.table import rows_of
from kvframe.eval.tasks import make_tasks

SETTINGS = Settings("tiny", ("niah", "continuation"), tokens=400, limit=2, seed=3)


def run(model, tokenizer, prose, folder, contenders, settings=SETTINGS, listener=None):
    results = open_results(folder)
    extra = [] if listener is None else [listener]
    return compare(model, tokenizer, contenders, settings, prose, results, *extra)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def done(model, tokenizer, prose, tmp_path_factory):
    """One comparison of a lossless, a quantised and a dropping spec."""
    folder = tmp_path_factory.mktemp("done")
    file = folder / "chunky.yaml"
    file.write_text("protect: {sink: 4, recent: 16}\nscorer: uniform\nallocator: top_k\n")
    contenders = make_contenders(["identity", str(file), "int8"], [2, 4])
    return folder, contenders, run(model, tokenizer, prose, folder / "out", contenders)


def test_every_example_is_measured_once(done):
    folder, contenders, comparison = done
    assert [(c.label, c.budget) for c in contenders] == [
        ("identity", "all"),
        ("chunky", "2x"),
        ("chunky", "4x"),
        ("int8", "all"),
    ]
    assert comparison.measured == len(comparison.records) == len(lines(folder / "out")) == 2 * 2 * 5
    assert not comparison.failures
    for record in comparison.records:
        assert record["scored_tokens"] == (64 if record["task"] == "continuation" else len(record_answer(record)))


def record_answer(record):
    # A random model never ends its reply, so it has as many tokens as are allowed.
    return [None] * record["scored_tokens"]


def test_the_identity_is_the_full_cache(done):
    _, contenders, comparison = done
    for record, full in zip(comparison.of(contenders[0].fingerprint), comparison.of("full"), strict=True):
        assert record["kl"] < 1e-6
        assert record["top1"] == 1
        assert record["nll"] == pytest.approx(full["nll"], abs=1e-4)
        assert record["entry_ratio"] == 1
        assert record.get("generated") == full.get("generated")


def test_what_is_dropped_shows(done):
    _, contenders, comparison = done
    two, four = (comparison.of(c.fingerprint) for c in contenders[1:3])
    for a, b in zip(two, four, strict=True):
        assert a["entry_ratio"] == pytest.approx(2, rel=0.02)
        assert b["entry_ratio"] == pytest.approx(4, rel=0.02)
        assert a["byte_ratio"] < b["byte_ratio"]
        assert a["kl"] > 1e-5
        assert a["full_bytes"] == b["full_bytes"] > b["bytes"]
        assert min(a["compress_ms"], a["decode_ms"], a["full_decode_ms"], a["prefill_ms"]) > 0
    (int8,) = {round(r["entry_ratio"], 6) for r in comparison.of(contenders[3].fingerprint)}
    assert int8 == 1


def test_a_record_says_what_made_it(done):
    _, contenders, comparison = done
    record = comparison.of(contenders[1].fingerprint)[0]
    assert record["spec_dump"] == contenders[1].pipeline.spec.dump()
    assert set(record["versions"]) == {"kvframe", "torch", "transformers", "python"}
    assert (record["model"], record["seed"], record["mode"], record["tokens"]) == ("tiny", 3, "query-aware", 400)


def test_a_second_run_measures_nothing(done, model, tokenizer, prose):
    folder, contenders, comparison = done
    seen = []
    again = run(model, tokenizer, prose, folder / "out", contenders, listener=lambda *event: seen.append(event))
    assert again.measured == 0
    assert again.records == comparison.records
    assert seen == [(0, 0, "done")]
    assert rows_of(again) == rows_of(comparison)


def test_an_interrupted_run_goes_on(model, tokenizer, prose, tmp_path, top_k_file):
    contenders = make_contenders(["identity", str(top_k_file)])
    whole = run(model, tokenizer, prose, tmp_path / "whole", contenders)
    data = (tmp_path / "whole" / "results.jsonl").read_bytes()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "results.jsonl").write_bytes(data[: int(len(data) * 0.6)])
    kept = len((tmp_path / "cut" / "results.jsonl").read_text().splitlines()) - 1
    totals = []
    again = run(
        model, tokenizer, prose, tmp_path / "cut", contenders, listener=lambda done, total, what: totals.append(total)
    )
    assert again.measured == len(whole.records) - kept == totals[0]
    same = ("task", "example", "fingerprint", "kl", "generated", "bytes")
    assert [{k: r.get(k) for k in same} for r in again.records] == [{k: r.get(k) for k in same} for r in whole.records]
    assert len(lines(tmp_path / "cut")) == len(whole.records)


def test_other_settings_are_other_measurements(done, model, tokenizer, prose):
    folder, contenders, _ = done
    settings = Settings("tiny", ("niah",), tokens=400, limit=1, seed=3, agnostic=True)
    other = run(model, tokenizer, prose, folder / "out", contenders[:1], settings)
    assert other.measured == 2
    # Nothing is dropped, so it does not matter when the question came.
    assert other.of(contenders[0].fingerprint)[0]["kl"] < 1e-6


def test_a_name_that_came_to_mean_another_model_is_measured_again(model):
    before = checkpoint_hash(model, "mine")
    assert before == checkpoint_hash(model, "mine") != ""
    assert checkpoint_hash(model, "smollm2") == ""
    epsilon = model.config.rms_norm_eps
    try:
        model.config.rms_norm_eps = 2 * epsilon
        assert checkpoint_hash(model, "mine") != before
    finally:
        model.config.rms_norm_eps = epsilon
    assert "checkpoint" in KEY


def test_a_spec_that_fails_is_named_and_the_others_go_on(model, tokenizer, prose, tmp_path, top_k_file):
    broken = tmp_path / "greedy.yaml"
    broken.write_text("protect: {recent: 300}\nbudget: {ratio: 8, strict: true}\n")
    contenders = make_contenders([str(broken), str(top_k_file)])
    comparison = run(
        model, tokenizer, prose, tmp_path / "out", contenders, Settings("tiny", ("continuation",), 400, 2, 3)
    )
    assert list(comparison.failures) == [contenders[0].fingerprint]
    assert "protected tokens" in comparison.failures[contenders[0].fingerprint]
    assert len(comparison.of(contenders[1].fingerprint)) == 2
    assert "greedy 8x failed: The budget of row 0" in markdown(comparison)
    assert "greedy (failed)" in [cells[0] for cells in rows_of(comparison).cells]


@pytest.mark.parametrize("agnostic", [False, True])
def test_the_compression_sees_the_question_only_if_it_may(agnostic, model, tokenizer, source):
    from kvframe import load

    example = make_tasks(["niah"], source)[0].example(0)
    runner = Runner(model, tokenizer, agnostic)
    pipeline = load("identity")
    observed, _ = observe(runner, example, [pipeline])
    hidden = example.prompt.suffix_length if agnostic else 1
    assert observed.get_seq_length() == len(example.prompt.ids) - hidden
    reference = run_reference(runner, example)
    before = reference.cache.get_seq_length()
    first, second = (run_compressed(reference, observed, pipeline) for _ in range(2))
    assert first["kl"] < 1e-6
    assert (first["kl"], first["generated"]) == (second["kl"], second["generated"])
    assert reference.cache.get_seq_length() == before


def test_the_table_is_never_cut(done):
    comparison = done[2]
    rows = rows_of(comparison)
    for width in (40, 100, 160):
        out = io.StringIO()
        print_table(comparison, Console(file=out, width=width))
        shown = out.getvalue()
        assert "…" not in shown
        for cells in rows.cells:
            assert any(line.split() == " ".join(cells).split() for line in shown.splitlines())
        if width >= 100:
            assert max(map(len, shown.splitlines())) <= width
    assert "query-aware" in shown
    text = markdown(comparison)
    assert text.count("\n| ") == 2 + len(rows.cells)


def test_the_same_pipeline_twice(top_k_file, tmp_path):
    with pytest.raises(InputError, match="'identity all' stands twice"):
        make_contenders(["identity", "identity"])
    copy = tmp_path / "copy.yaml"
    copy.write_text(top_k_file.read_text())
    with pytest.raises(InputError, match="'copy 2x' is the same pipeline as 'chunky 2x'"):
        make_contenders([str(top_k_file), str(copy)])
    other = tmp_path / "deep" / "chunky.yaml"
    other.parent.mkdir()
    other.write_text(top_k_file.read_text() + "encoder: int8\n")
    assert [c.label for c in make_contenders([str(top_k_file), str(other)])] == [str(top_k_file), str(other)]


def test_budgets_of_every_kind(top_k_file):
    text = top_k_file.read_text()
    shown = []
    for budget in ("{ratio: 2.5}", "{entries: 96}", "{bytes: 64MiB}"):
        top_k_file.write_text(text.replace("{ratio: 2}", budget))
        shown += [c.budget for c in make_contenders([str(top_k_file)])]
    assert shown == ["2.5x", "96 entries", "64.0MiB"]


def test_prompts_longer_than_the_model_reads(model, tokenizer, prose, tmp_path):
    with pytest.raises(InputError, match="positions, but the model has 1024"):
        run(
            model,
            tokenizer,
            prose,
            tmp_path,
            make_contenders(["identity"]),
            Settings("tiny", ("continuation",), 1000, 1),
        )


def test_prompts_too_short_for_a_ratio_are_measured_and_named(model, tokenizer, prose, tmp_path, top_k_file):
    """What is kept of them is in the table; a strict budget fails as before."""
    contenders = make_contenders(["identity", str(top_k_file)], [64.0])
    done = run(model, tokenizer, prose, tmp_path, contenders)
    assert not done.failures
    line = "chunky 64x: 4 of 4 prompts were too short for the budget, so more is kept of them than was asked for."
    assert f"- {line}" in markdown(done).splitlines()
    assert all(1 < record["entry_ratio"] < 64 for record in done.of(contenders[1].fingerprint))
    strict = make_contenders([str(top_k_file)], [64.0], {"budget.strict": True})
    failed = run(model, tokenizer, prose, tmp_path, strict)
    assert "protected tokens" in failed.failures[strict[0].fingerprint]
