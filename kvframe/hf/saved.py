"""Caches on disk: one safetensors file with the tensors that are held and a JSON header that says what they are."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvframe import __version__
from kvframe.arguments import expect
from kvframe.artefact import rope_fingerprint, write_whole
from kvframe.errors import InputError, KvframeError
from kvframe.hf.info import layer_devices
from kvframe.hf.layer import CompressedLayer
from kvframe.hf.protected import uncompressed
from kvframe.hf.recurrent import RecurrentLayer, as_data, restore
from kvframe.hf.remarks import on_waiting
from kvframe.pipeline import Pipeline
from kvframe.placement import on, spread
from kvframe.plain import flatten, held_tensors, map_tensors, unflatten
from kvframe.spec import validate_spec
from kvframe.types import Encoded, Part

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache

log = logging.getLogger("kvframe")

# Counts up when what stands in the file changes.
FORMAT = 2
HEADER = "kvframe cache"
BOOKS = ("compressions", "seconds", "tokens", "begun", "context", "allowed", "kept", "owed", "notes", "remarks")


def save(cache: CompressedCache, path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Write all that the cache holds. See CompressedCache.save."""
    path = _checked(path, tokenizer)
    if cache.valid is None or cache.positions is None:
        raise InputError("There is nothing to save: the cache has not seen a prompt yet.")
    for note in on_waiting(uncompressed(cache)[1]):
        log.warning("Saved as it is: %s.", note)
    tensors: dict[str, Tensor] = {}
    layers = [
        _layer(layer, tensors) if isinstance(layer, CompressedLayer) else as_data(layer, tensors)
        for layer in cache.layers
    ]
    states, learned = list(cache.states or ()), cache.bound is not None
    header = {
        "format": FORMAT,
        "kvframe": __version__,
        "name": cache.pipeline.name,
        "spec": cache.pipeline.spec.dump(),
        **_belongs_to(cache, tokenizer),
        "layers": layers,
        "watch": flatten([list(tail.tensors()) for tail in cache.watch.tails()], tensors, "watch."),
        "books": flatten({name: getattr(cache.ledger, name) for name in BOOKS}, tensors, "books."),
        "valid": flatten(cache.valid, tensors, "valid."),
        "positions": flatten(cache.positions, tensors, "positions."),
        "columns": flatten(cache.columns.dump(), tensors, "columns."),
        "prefix": _plain_lengths(cache.prefix_length),
        "suffix": _plain_lengths(cache.suffix_length),
        "pending": cache.pending,
        # What an artefact gives is not written again; its hash says whether it is still the same.
        "learned": digest(list(held_tensors(list(cache.bound)))) if learned else "",
        "fitted": cache.states is not None,
        "states": None if learned or not states else flatten(states, tensors, "state."),
    }
    tensors = _apart(tensors)
    text = json.dumps(header)
    metadata = {HEADER: text, "sha256": _checksum(text, tensors)}
    write_whole(path, tensors, metadata, "cache")


def load_cache(
    path: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> CompressedCache:
    """Read a cache that `cache.save` wrote, to go on with on `model`: the same model, in the same dtype, with the same
    RoPE scaling, and the same `tokenizer` if both sides name one. The file is mapped, not copied, so two loads share
    their memory until one of them writes, and the file must stay as it is.

    Raises InputError for a file that is missing, damaged, foreign or newer, or of another model, and what making a
    cache raises, such as for a plugin or a calibration that is missing."""
    path = _checked(path, tokenizer)
    header, tensors = _read(path)
    try:
        pipeline = Pipeline(validate_spec(header["spec"], f"the spec in {path}"), header["name"])
        cache = pipeline.cache(model, header["prefix"], header["suffix"])
        _check_owner(path, header, _belongs_to(cache, tokenizer))
        _restore(cache, header, tensors)
    except KvframeError:
        raise
    # The checksum held, so the file is what some other version wrote.
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"The cache {path} was written by kvframe {header.get('kvframe')} and cannot be understood by "
            f"{__version__} ({type(error).__name__}: {error}); make it anew."
        ) from error
    return cache


def _checked(path: str | Path, tokenizer: PreTrainedTokenizerBase | None) -> Path:
    """The path of a cache. Raises InputError for what is no path, or no tokenizer."""
    expect("The path of a cache", path, (str, Path), "a str or a pathlib.Path")
    # Whatever has a vocabulary will do.
    if not hasattr(tokenizer, "get_vocab"):
        expect("tokenizer", tokenizer, NoneType, "a tokenizer of transformers, or None")
    return Path(path)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, no two of them in one storage."""
    found: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        held = tensor.detach().cpu().contiguous()
        found[name] = held.clone() if held.untyped_storage().data_ptr() in taken else held
        taken.add(found[name].untyped_storage().data_ptr())
    return found


def digest(tensors: list[Tensor]) -> str:
    """A hash of the tensors' contents, in their order."""
    return _checksum("", {str(index): tensor.detach().cpu().contiguous() for index, tensor in enumerate(tensors)})


def _layer(layer: CompressedLayer, tensors: dict[str, Tensor]) -> dict[str, Any]:
    encoders = layer.cache.pipeline.encoders
    parts = [
        {
            "exact": part.encoder not in encoders,
            "grade": encoders.index(part.encoder) if part.encoder in encoders else 0,
            "encoded": flatten(
                {
                    "offsets": part.encoded.offsets,
                    "codes": dict(part.encoded.codes),
                    "log_multiplicity": part.encoded.log_multiplicity,
                    "positions": part.encoded.positions,
                },
                tensors,
                "part.",
            ),
            "format": part.encoded.format,
            "dtype": str(part.encoded.dtype).removeprefix("torch."),
        }
        for part in layer.parts
    ]
    return {
        "parts": parts,
        "seen": layer.seen,
        "recent": flatten([layer.recent.keys, layer.recent.values], tensors, "recent."),
        "queries": flatten(layer.queries.tensors(), tensors, "queries."),
        "outputs": flatten(layer.outputs.tensors(), tensors, "outputs."),
        "beside": as_data(layer.beside, tensors) if isinstance(layer, RecurrentLayer) else None,
    }


def _restore(cache: CompressedCache, header: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Give a fresh cache what stands in the file."""
    encoders, devices = cache.pipeline.encoders, layer_devices(cache.live_model())
    package, own = type(encoders[0]).__module__.partition(".")[0], [devices[index] for index in cache.info.layer_ids]

    def read(data: Any, device: torch.device = own[0]) -> Any:
        return on(unflatten(data, tensors, package), device)

    if cache.bound is not None:
        if header["learned"] != digest(list(held_tensors(list(cache.bound)))):
            raise InputError(
                "The saved cache was coded with another calibration than this one; load it where that calibration is, "
                "or make it anew."
            )
        cache.states = spread(cache.bound, own) if header["fitted"] else None
    elif header["states"] is not None:
        # Mapped tensors lie at odd addresses, where matrix products round differently.
        cache.states = spread(map_tensors(read(header["states"]), torch.clone), own)
    for index, (layer, held) in enumerate(zip(cache.layers, header["layers"], strict=True)):
        if not isinstance(layer, CompressedLayer):
            if held["kind"] != type(layer).__name__:
                raise ValueError(f"layer {index} is a {type(layer).__name__}, not a {held['kind']}")
            restore(layer, read(held["other"], devices[index]))
            continue
        state = () if cache.states is None else cache.states[cache.info.layer_ids.index(index)]
        parts = tuple(_part(part, read(part["encoded"], devices[index]), encoders, state) for part in held["parts"])
        watched = (read(held[name], devices[index]) for name in ("recent", "queries", "outputs"))
        layer.restore(parts, held["seen"], *watched)
        if isinstance(layer, RecurrentLayer):
            restore(layer.beside, read(held["beside"]["other"], devices[index]))
    for tail, pieces in zip(cache.watch.tails(), read(header["watch"]), strict=True):
        tail.restore(pieces)
    for name, value in read(header["books"]).items():
        setattr(cache.ledger, name, value)
    cache.valid, cache.positions, cache.pending = read(header["valid"]), read(header["positions"]), header["pending"]
    cache.columns.restore(read(header["columns"]))
    cache.note_validity()


def _part(held: dict[str, Any], encoded: dict[str, Any], encoders: tuple[Any, ...], state: Any) -> Part:
    from kvframe.builtin.encoders import Dense

    codes = Encoded(format=held["format"], dtype=getattr(torch, held["dtype"]), **encoded)
    if held["exact"]:
        return Part(codes, Dense())
    grade = held["grade"]
    return Part(codes, encoders[grade], state if len(encoders) == 1 else state[grade])


def _plain_lengths(value: Any) -> Any:
    return torch.as_tensor(value).tolist()


def _belongs_to(cache: CompressedCache, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str]:
    """What a saved cache and its model must have in common."""
    model = cache.live_model()
    vocabulary = "" if tokenizer is None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return {
        "model": cache.info.fingerprint,
        "rope": rope_fingerprint(cache.info.rope),
        "dtype": str(model.dtype).removeprefix("torch."),
        "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest()[:12] if vocabulary else "",
    }


def _check_owner(path: Path, header: dict[str, Any], mine: dict[str, str]) -> None:
    for name, reason in (
        ("model", "it was made with another model"),
        ("dtype", f"it was made in {header['dtype']}, but the model is in {mine['dtype']}"),
        ("rope", "it was made with another RoPE scaling or base"),
        ("tokenizer", "it was made with another tokenizer"),
    ):
        # Without a tokenizer on either side there is nothing to compare.
        known = name != "tokenizer" or (header[name] and mine[name])
        if known and header[name] != mine[name]:
            raise InputError(f"The cache {path} does not fit: {reason}; load it with that one, or make it anew.")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors, held against their checksum. The tensors are mapped: no memory is taken until it is read, and
    what two loads read is in memory once."""
    remedy = "make it anew with cache.save."
    if path.is_dir():
        raise InputError(f"The cache {path} cannot be read: it is a folder; name the file that cache.save wrote.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise InputError(f"There is no cache at {path}; {remedy}") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"The cache {path} cannot be read ({error}); {remedy}") from error
    text = metadata.get(HEADER)
    if text is None:
        raise InputError(f"The file {path} is no kvframe cache; {remedy}")
    if metadata.get("sha256") != _checksum(text, tensors):
        raise InputError(f"The cache {path} is damaged: its checksum does not fit its contents; {remedy}")
    header: Any = None
    with contextlib.suppress(ValueError):
        header = json.loads(text)
    if not isinstance(header, dict):
        raise InputError(f"The cache {path} has a header that is none; {remedy}")
    if header.get("format") != FORMAT:
        raise InputError(
            f"The cache {path} has format {header.get('format')}, but this version reads {FORMAT}; {remedy}"
        )
    return header, tensors


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the header and of each tensor's name, dtype, shape and bytes."""
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
    return total.hexdigest()
