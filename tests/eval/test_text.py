"""The texts: the embedded one is always the same, and a file that is no text is refused."""

import pytest

from kvframe.errors import InputError
from kvframe.eval.text import embedded_text, read_text


def test_embedded_text_is_long_and_always_the_same():
    text = embedded_text()

    assert len(text) > 300_000
    assert text == embedded_text()


def test_embedded_text_is_ordered_by_topic():
    text = embedded_text()

    # "assert" comes before "with", whatever order the library lists them in.
    assert 0 <= text.index('The "assert" statement') < text.index('The "with" statement')


@pytest.mark.parametrize("text", ["one line", "caf\u00e9\nna\u00efve\n", " \n x"])
def test_read_text_gives_what_was_written(tmp_path, text):
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())

    assert read_text(path) == read_text(str(path)) == text


def test_read_text_drops_the_byte_order_mark(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfword")

    assert read_text(path) == "word"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"caf\xe9 au lait", "is not UTF-8 text: byte 3 is 0xe9"),
        (b"abc\x00def", "is binary: byte 3 is NUL"),
        ("wide".encode("utf-16"), "is not UTF-8 text: byte 0 is 0xff"),
    ],
)
def test_read_text_refuses_what_is_no_text(tmp_path, content, reason):
    path = tmp_path / "text.txt"
    path.write_bytes(content)

    with pytest.raises(InputError) as failure:
        read_text(path)

    assert str(path) in str(failure.value)
    assert reason in str(failure.value)


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_read_text_names_a_file_that_cannot_be_read(tmp_path, name):
    with pytest.raises(InputError, match=r"could not be read: (No such file|Is a directory)"):
        read_text(tmp_path / name)
