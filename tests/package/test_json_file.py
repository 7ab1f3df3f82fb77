"""JSON files: what is read, and the one line that names a file which is not."""

from pathlib import Path

import pytest

from qwen_onnx.contract.json_file import read_json
from qwen_onnx.errors import UserError


@pytest.mark.parametrize(
    "content", [b'{"a": 1, "b": null}', b'\xef\xbb\xbf{"a": 1, "b": null}', b'{"a": 0, "b": null, "a": 1}']
)
def test_objects_are_read(tmp_path: Path, content: bytes) -> None:
    """After a byte order mark too; of a repeated key the last value counts."""
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert read_json(path) == {"a": 1, "b": None}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"[1]", "array"),
        (b'"x"', "string"),
        (b"5", "number"),
        (b"true", "boolean"),
        (b"null", "null"),
    ],
)
def test_damage_is_one_line_that_names_the_file(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        read_json(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for name in ("missing.json", "folder.json"):
        with pytest.raises(UserError, match=name):
            read_json(tmp_path / name)
