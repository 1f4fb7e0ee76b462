"""Results on disk: one JSON line a measurement, written whole, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvframe.errors import InputError

Record = Mapping[str, Any]

# What makes two measurements the same one.
KEY = (
    "task",
    "example",
    "fingerprint",
    "model",
    "checkpoint",
    "dtype",
    "device",
    "tokens",
    "seed",
    "mode",
    "text",
    "versions",
)


def record_key(record: Record) -> str:
    """What identifies a measurement, as text."""
    return json.dumps([record.get(name, "") if name == "checkpoint" else record[name] for name in KEY], sort_keys=True)


class Results:
    """The measurements in one file.

    Attributes:
        path: the file, `results.jsonl` in the output folder.
        notes: what the user should know of the file as it was found.
    """

    def __init__(self, folder: Path) -> None:
        """Open or create the file.

        Raises InputError if the folder cannot be written or the file holds anything else."""
        self.path = folder / "results.jsonl"
        self.notes: list[str] = []
        self._records: dict[str, Record] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab"):
                pass
            self._read(self.path.read_bytes())
        except OSError as error:
            raise InputError(
                f"The results cannot be written to {folder}: {error.strerror or error}; choose another folder."
            ) from error

    def _read(self, data: bytes) -> None:
        whole, _, rest = data.rpartition(b"\n")
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self._keep(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{self.path}:{number}: this line is no result of `kvframe compare`; mend or move the file."
                ) from error
        if rest:
            # A line without its end was cut off while it was written.
            with self.path.open("r+b") as file:
                file.truncate(len(data) - len(rest))
            self.notes.append(f"The last line of {self.path} was cut off; it is measured again.")

    def _keep(self, record: Record) -> None:
        self._records[record_key(record)] = record

    def find(self, identity: Record) -> Record | None:
        """The measurement with this identity (all of `KEY`), if it is there."""
        return self._records.get(record_key(identity))

    def append(self, record: Record) -> None:
        """Write one measurement, at once and whole. Raises InputError if it cannot be written."""
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        try:
            with self.path.open("ab", buffering=0) as file:
                before = file.tell()
                # A disk that is nearly full takes a part of a line without an error.
                if file.write(line) != len(line):
                    file.truncate(before)
                    raise InputError(
                        f"{self.path} cannot be written: there is no more room; make some and run it again."
                    )
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror or error}.") from error
        self._keep(json.loads(line))

    def __len__(self) -> int:
        return len(self._records)
