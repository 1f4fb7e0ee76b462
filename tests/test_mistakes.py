"""Values of the wrong type in a spec, and what is said of them: one sentence, with file and line."""

from __future__ import annotations

import pytest

from kvframe.errors import SpecError
from kvframe.spec import read_spec, validate_spec
from kvframe.yamlfile import read_yaml

STAGE = r"scorer: must be a stage's name, or \{name: …\}"
WHOLE, NUMBER = "must be a whole number", "must be a number"
BYTES = "budget.bytes: must be a number of bytes, such as 64MiB or 67108864"
STEPS = {"name": "centroidkv.soft_matching", "schedule": "tighten"}
LARGE = r"must be smaller than 2\*\*40, about 1.1e12"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "scorer: {window: 3}",
            r"scorer: must be a stage's name, or \{name: …, window: 3\}, but it is \{'window': 3\}",
        ),
        ("scorer: 3", f"{STAGE}, but it is 3"),
        ("scorer: [uniform]", rf"{STAGE}, but it is \['uniform'\]"),
        ("scorer: null", f"{STAGE}, but it is null"),
        ("scorer: {name: null}", "scorer: there is no scorer named null; there are: .*"),
        (
            "budget: 8",
            r"budget: must be \{ratio: …\} or the like \(keys: ratio, of, entries, bytes, strict\), but it is 8",
        ),
        ("protect: null", r"protect: must be \{sink: …\} or the like \(keys: .*\), but it is null"),
        ("decode: true", r"decode: must be \{flush: …\} or the like \(keys: flush\), but it is true"),
        ("budget: {ratio: eight}", f"budget.ratio: {NUMBER}, but it is 'eight'"),
        ("budget: {ratio: [8]}", rf"budget.ratio: {NUMBER}, but it is \[8\]"),
        ("budget: {of: 3}", "budget.of: must be 'entries' or 'bytes', but it is 3"),
        ("budget: {entries: 1.5}", f"budget.entries: {WHOLE}, but it is 1.5"),
        ("protect: {sink: 1.5}", f"protect.sink: {WHOLE}, but it is 1.5"),
        ("protect: {sink: null}", f"protect.sink: {WHOLE}, but it is null"),
        ("description: 3", "description: must be text, in quotes where YAML reads something else, but it is 3"),
        (
            "allocator: {name: centroidkv.soft_matching, recluster: 7}",
            "allocator.recluster: must be true or false, .* 7",
        ),
        # A union's members are one mistake.
        (
            "encoder: {name: aatc.transform, joint_heads: x}",
            "encoder.joint_heads: must be 'all' or a whole number, but it is 'x'",
        ),
        ("encoder: {name: aatc.transform, joint_heads: {}}", r"encoder.joint_heads: must be .*, but it is \{\}"),
        ('budget: {bytes: "12 parsecs"}', f"{BYTES}, but it is '12 parsecs'"),
        # pydantic reads the beginning of these.
        ('budget: {bytes: "64,000"}', f"{BYTES}, but it is '64,000'"),
        ('budget: {bytes: "1.5.5 MB"}', f"{BYTES}, but it is '1.5.5 MB'"),
        ("budget: {bytes: 1.5}", f"{BYTES}, but it is 1.5"),
        # True is 1 for Python and pydantic, but nobody means it.
        ("budget: {ratio: true}", f"budget.ratio: {NUMBER}, but it is true"),
        ("budget: {bytes: true}", f"budget.bytes: {NUMBER}, but it is true"),
        ("protect: {sink: false}", f"protect.sink: {NUMBER}, but it is false"),
        ("version: true", f"version: {NUMBER}, but it is true"),
        ("segmenter: {name: chunks, size: true}", f"segmenter.size: {NUMBER}, but it is true"),
        # Numbers that torch would choke on.
        (f"segmenter: {{name: chunks, size: {10**30}}}", f"segmenter.size: {LARGE}, but it is {10**30}"),
        ("segmenter: {name: chunks, size: 1.0e+300}", rf"segmenter.size: {LARGE}, but it is 1e\+300"),
        ("budget: {ratio: 1.0e+300}", rf"budget.ratio: {LARGE}, but it is 1e\+300"),
        (f"decode: {{flush: {2**40}}}", f"decode.flush: {LARGE}, but it is {2**40}"),
        (f"protect: {{recent_min: {2**70}}}", f"protect.recent_min: {LARGE}, but it is {2**70}"),
    ],
)
def test_wrong_values(tmp_path, line, said):
    file = tmp_path / "mine.yaml"
    file.write_text(f"\n{line}\n")
    with pytest.raises(SpecError, match=rf"^\S*mine\.yaml:2: {said}\.$"):
        read_spec(file)


def test_true_among_others_is_found():
    with pytest.raises(SpecError, match=r"^spec: allocator.thresholds.1: must be a number, but it is true.$"):
        validate_spec({"allocator": {**STEPS, "thresholds": [0.5, True]}})


def test_values_are_not_said_at_length():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    for value in (deep, "x" * 10_000, list(range(10_000)), 10**5000):
        with pytest.raises(SpecError) as error:
            read_spec("snapkv", {"scorer.window": value})
        assert len(str(error.value)) < 300


def test_a_key_of_several_lines_is_one_mistake():
    with pytest.raises(SpecError, match=r"^spec: protect.a b: unknown key 'a b'; there are: "):
        validate_spec({"protect": {"a\nb": 1}})


def test_what_is_nested_too_deep():
    with pytest.raises(SpecError, match=r"^override: 'a.a.*' is more than 32 levels deep"):
        read_spec("snapkv", {".".join("a" * 5000): 1})
    with pytest.raises(SpecError, match=r"^value:1: more than 32 levels deep"):
        read_yaml("[" * 5000 + "]" * 5000, "value")
