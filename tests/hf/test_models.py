"""Loading by a folder, a file or an id. Each way to be wrong is one sentence that says what to change."""

import json
import re
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvframe.errors import InputError, ModelError
from kvframe.hf.models import load_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model with random weights in bfloat16, and a tokenizer of three words."""
    folder = tmp_path / "tiny"
    config = LlamaConfig(
        vocab_size=7,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "sink": 2, "recent": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", [str, Path])
def test_folder_gives_the_weights_it_holds(folder, kind):
    model, tokenizer = load_model(kind(folder))

    stored = load_file(folder / "model.safetensors")
    held = model.state_dict()
    assert stored.keys() == held.keys()
    assert all(torch.equal(stored[name], held[name]) for name in stored)
    assert not model.training
    assert tokenizer("recent sink").input_ids == [3, 2]


def test_tokenizer_pads_on_the_left(folder):
    _, tokenizer = load_model(folder)

    assert tokenizer(["recent sink", "sink"], padding=True).input_ids == [[3, 2], [1, 2]]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16), (torch.float64, torch.float64)],
)
def test_dtype(folder, dtype, expected):
    model, _ = load_model(folder, dtype=dtype)

    assert {parameter.dtype for parameter in model.parameters()} == {expected}


def test_device(folder):
    model, _ = load_model(folder, device="meta")

    assert model.device.type == "meta"


@pytest.mark.parametrize("dtype", ["fp7", "int8", ""])
def test_unknown_dtype(folder, dtype):
    with pytest.raises(InputError, match=r"expected 'auto' or one of float32, bfloat16, float16\."):
        load_model(folder, dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", ""])
def test_unknown_device(folder, device):
    with pytest.raises(InputError, match=rf"device '{device}' cannot be used here .*'cpu'\.$"):
        load_model(folder, device=device)


def fails(name: str | Path) -> str:
    """The one line that loading `name` fails with."""
    with pytest.raises(ModelError) as failure:
        load_model(name)
    message = str(failure.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


@pytest.mark.parametrize("name", ["./nowhere", "no/such/folder", "~/nowhere.gguf", "model.gguf", Path("smollm2")])
def test_path_that_does_not_exist(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    message = fails(name)

    assert message.startswith("There is no model at ")
    assert message.endswith("no such file or folder; check the path.")


def test_folder_without_a_model(tmp_path):
    message = fails(tmp_path)

    assert f"The folder {tmp_path} holds no model: it has no config.json" in message


def test_a_reason_of_two_lines_is_said_on_one(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": -4}')
    assert re.search(r"\(Class validation error .*: ValueError: The hidden size", fails(tmp_path))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04zip"])
def test_file_that_is_no_gguf(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    message = fails(path)

    assert f"The file {path} is no GGUF file: it starts with {content[:4]!r} instead of b'GGUF'" in message


@pytest.mark.parametrize("size", [0, 5, 4000])
def test_gguf_that_does_not_parse(tmp_path, size):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(size))

    message = fails(path)

    assert message.startswith(f"No model could be read from {path} (")
    assert message.endswith("name a complete GGUF file of a causal language model.")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_gguf_without_the_packages_it_needs(tmp_path, monkeypatch, package):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, package, None)

    assert fails(path).endswith("install them with: pip install 'kvframe[eval]'")


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{nope")


def take_another_kind_of_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))


def remove_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_the_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def widen_the_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 21}))


def remove_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        break_config,
        take_another_kind_of_model,
        remove_the_weights,
        cut_the_weights,
        widen_the_model,
        remove_the_tokenizer,
    ],
)
def test_damaged_folder(folder, damage):
    damage(folder)

    message = fails(folder)

    assert message.startswith(f"No model could be read from {folder} (")
    assert message.endswith("name a folder that save_pretrained wrote for a causal language model and its tokenizer.")


def test_missing_weights_are_not_filled_with_random_ones(folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    lost = [name for name in weights if "layers.1.mlp" in name]
    save_file({name: weights[name] for name in weights.keys() - set(lost)}, path, metadata={"format": "pt"})

    message = fails(folder)

    assert f"lacks {len(lost)} of the model's weights, such as model.layers.1.mlp.down_proj.weight" in message


def test_hub_id_that_cannot_be_fetched(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    message = fails("no-such-owner/no-such-model")

    assert message.startswith("No model could be read from no-such-owner/no-such-model (")
    assert "pass 'smollm2', an existing folder or .gguf file, or an id that the hub can serve" in message


def test_the_first_error_is_kept_for_debugging(folder):
    break_config(folder)

    with pytest.raises(ModelError) as failure:
        load_model(folder)

    assert isinstance(failure.value.__cause__, OSError)
