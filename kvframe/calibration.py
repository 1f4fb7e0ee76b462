"""Encoders that learn from a text once, and the artefacts that keep what they learned."""

from __future__ import annotations

import hashlib
import json
import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor

from kvframe.artefact import Artefact, load_artefact, rope_fingerprint
from kvframe.cachedir import cache_dir
from kvframe.errors import InputError
from kvframe.placement import spread
from kvframe.stages import Encoder
from kvframe.types import Amount, ModelInfo, Needs, Observation, Reading

AUTO, PROMPT = "auto", "prompt"
REMEMBERED = 8
_MEMORY: dict[Any, Sequence[Any]] = {}
log = logging.getLogger("kvframe")


class CalibratedEncoder(Encoder):
    """An encoder whose states come from an artefact, or from the prompt itself.

    A subclass says what it learns from a stream of observations (`learn`) and what states follow from that
    (`states`)."""

    calibration: str = Field(
        AUTO,
        description="A file of `kvframe calibrate`; auto = that in the user's cache; prompt = none, fit each prompt.",
    )

    @abstractmethod
    def learn(self, observations: Iterable[Observation], model: ModelInfo) -> Mapping[str, Tensor]:
        """Return what is to be kept of the observations' bodies, in memory that does not grow with their number."""

    @abstractmethod
    def states(self, learned: Mapping[str, Tensor], model: ModelInfo) -> Sequence[Any]:
        """Return one state a layer. Raises a KvframeError if it cannot be had for this model."""

    @property
    @abstractmethod
    def learned_with(self) -> Mapping[str, Any]:
        """The parameters on which `learn` depends, as plain data."""

    @property
    def calibration_needs(self) -> Needs:
        """What `learn` must be shown of a calibration text."""
        return Needs()

    @property
    def parameters(self) -> str:
        """Fingerprint of `learned_with`."""
        text = json.dumps(dict(self.learned_with), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def artefact_path(self, model: ModelInfo) -> Path:
        """Where `auto` looks."""
        parts = (self.name, model.fingerprint, rope_fingerprint(model.rope), self.parameters)
        return cache_dir() / "calibration" / f"{'-'.join(parts)}.safetensors"

    def calibrate(self, reading: Reading, model: ModelInfo) -> Artefact:
        """Learn from a text."""
        learned = self.learn(reading.observations, model)
        rope = rope_fingerprint(model.rope)
        return Artefact(self.name, self.parameters, model.fingerprint, rope, reading.text, reading.tokens, learned)

    def bind(self, model: ModelInfo) -> Sequence[Any] | None:
        """The states, from the artefact; None if the prompt is to be fitted.

        With `auto` and without an artefact, a model that brings a text of its own (the embedded one) is calibrated on
        it, once. Raises InputError, with the command that makes the artefact, if there is none or it does not fit."""
        if self.calibration == PROMPT:
            return None
        path = self.artefact_path(model) if self.calibration == AUTO else Path(self.calibration).expanduser()
        if not path.exists() and self.calibration == AUTO:
            if model.read is None:
                raise InputError(
                    f"Encoder '{self.name}' was not calibrated for this {model.name} with these parameters; "
                    f"{self.remedy}"
                )
            reading = model.read(self.calibration_needs)
            log.warning(
                "%s learns from %d tokens of %s, once; what it learned is kept in %s. Text like that to be compressed "
                "teaches it better: kvframe calibrate --spec SPEC --text FILE",
                *(self.name, reading.tokens, reading.title, path),
            )
            self.calibrate(reading, model).save(path)
        return _remembered(self, model, path)

    @property
    def remedy(self) -> str:
        """The command that makes the artefact."""
        out = "" if self.calibration == AUTO else f" --out {self.calibration}"
        return (
            f"make it with: kvframe calibrate --model MODEL --spec SPEC --text FILE{out} "
            "(or set encoder.calibration: prompt)."
        )

    def fit(self, observation: Observation, bound: Any = None) -> Sequence[Any]:
        """What `bind` returned; without it, the states that the observation itself gives."""
        if bound is not None:
            return bound
        seen = _asked_for(observation, self.needs)
        return self.states(self.learn([seen], seen.model), seen.model)


def _asked_for(observation: Observation, needs: Needs) -> Observation:
    """The observation without what other stages have asked for, so that it does not matter what they are."""

    def last(tensor: Tensor | None, amount: Amount) -> Tensor | None:
        if tensor is None or amount == 0:
            return None
        return tensor if amount == "all" else tensor[:, :, -int(amount) :]

    layers = tuple(
        replace(
            layer,
            queries=last(layer.queries, needs.queries),
            head_outputs=last(layer.head_outputs, needs.head_outputs),
        )
        for layer in observation.layers
    )
    return replace(observation, layers=layers)


def _remembered(encoder: CalibratedEncoder, model: ModelInfo, path: Path) -> Sequence[Any]:
    """The states of an artefact. The last few are kept: every cache of a pipeline binds its stages anew."""
    written = (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None
    places = model.devices or model.rope[0].inv_freq.device
    key = (encoder, path, written, model.fingerprint, rope_fingerprint(model.rope), places)
    if key not in _MEMORY:
        artefact = load_artefact(path, encoder.remedy)
        artefact.check(path, encoder.name, encoder.parameters, model, encoder.remedy)
        try:
            states = encoder.states(artefact.tensors, model)
        except KeyError as error:
            raise InputError(f"The calibration {path} lacks {error}; {encoder.remedy}") from None
        while len(_MEMORY) >= REMEMBERED:
            del _MEMORY[next(iter(_MEMORY))]
        _MEMORY[key] = spread(states, model.devices) if model.devices else states
    return _MEMORY[key]
