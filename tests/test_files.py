"""What people write is read whatever their editor makes of it; what is written is whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from peer.machine.limits import LIMITS_FILE, read_limits
from peer.machine.measured_layers import write_layers
from swarmnet.admission import Invite
from swarmnet.errors import SpecError, UserError
from swarmnet.files import LinesFile, append_whole, is_full, older, text_of, write_whole
from swarmnet.identity import Identity
from swarmnet.runtime.admission import admit
from swarmnet.runtime.joining.find import Named
from swarmnet.simulation.churn import read_trace
from swarmnet.spec import RunSpec, load_spec, parse_spec
from swarmnet.training.data.encoding import tokenizer_files
from swarmnet.training.models.model_folder import small_files
from tests.training.specs import small_spec

COMMENTED = "# mine\n\n  {} # at home\n#{}\n"
WAYS = {
    "as it is": lambda text: text.encode(),
    "with a mark": lambda text: text.encode("utf-8-sig"),
    "Windows": lambda text: text.replace("\n", "\r\n").encode("utf-8-sig"),
    "trailing spaces": lambda text: text.replace("\n", "  \n").encode() + b" \n\n",
}
WIDE = ("utf-16", "utf-32", "utf-16-le", "utf-16-be")
ADDRESS = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWEchVMMMe"
SPEC = """name = "edited"
[model]
kind = "llama"
hidden_size = 32
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 64
vocab_size = 256
max_position_embeddings = 16
[data]
paths = ["python-stdlib"]
tokenizer = "bytes"
sequence_length = 16
[optimizer]
learning_rate = 1e-3
rounds = 5
warmup_rounds = 1
[pipeline]
num_stages = 2
global_batch = 4
microbatch = 2
"""


def wide(text: str, encoding: str) -> bytes:
    """With a mark, as editors write it."""
    mark = "\ufeff" if encoding.endswith("e") else ""
    return (mark + text).encode(encoding)


@pytest.mark.parametrize("way", WAYS)
def test_what_people_write_is_read(tmp_path: Path, way: str) -> None:
    path = tmp_path / "file"

    def written(text: str) -> Path:
        path.write_bytes(WAYS[way](text))
        return path

    written(f"{ADDRESS}\n{ADDRESS}8\n")
    assert Named([f"@{path}"]).read() == ([ADDRESS, f"{ADDRESS}8"], [])
    assert load_spec(written(SPEC)) == parse_spec(SPEC)
    limits = read_limits(written('max_upload = "10Mbit"\npaused = true\n'))
    assert limits.paused
    spec, invite = closed_run()
    assert admit(spec, "peer", str(written(f"{invite}\n")), None).credential


@pytest.mark.parametrize("way", WAYS)
def test_lists_and_invites_may_have_comments(tmp_path: Path, way: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(WAYS[way](COMMENTED.format(ADDRESS, f"{ADDRESS}8")))
    assert Named([f"@{path}"]).read() == ([ADDRESS], [])
    spec, invite = closed_run()
    path.write_bytes(WAYS[way](COMMENTED.format(invite, "other")))
    assert admit(spec, "peer", str(path), None).credential
    event = '{"at_s": 5.0, "action": "crash"}'
    path.write_bytes(WAYS[way](f"# crashes\n{event}\n"))
    assert [e.at_s for e in read_trace(path)] == [5.0]


def closed_run() -> tuple[RunSpec, Invite]:
    owner = Identity.generate()
    values = small_spec().model_dump()
    values["security"] = {"admission": "invite", "owner": owner.peer_id}
    spec = RunSpec.model_validate(values)
    return spec, Invite.issue(owner, spec.run_id, 2**40)


def test_an_invite_is_taken_with_what_was_copied_around_it() -> None:
    spec, invite = closed_run()
    for given in (f" {invite}\n", f"\ufeff{invite}", f"{invite}\r\n"):
        assert admit(spec, "peer", given, None).credential


@pytest.mark.parametrize("encoding", WIDE)
def test_other_encodings_are_named(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / LIMITS_FILE
    path.write_bytes(wide(SPEC, encoding))
    name = encoding.upper()[:6]
    spec, _ = closed_run()
    for read in (
        lambda: load_spec(path),
        lambda: read_limits(path),
        lambda: Named([f"@{path}"]).read(),
        lambda: admit(spec, "peer", str(path), None),
    ):
        with pytest.raises(UserError, match=f"{path} is {name} text; save it as UTF-8"):
            read()


def test_bytes_that_are_no_text_are_one_line() -> None:
    with pytest.raises(SpecError, match=r"x\.toml is not UTF-8 text"):
        text_of(b"name = '\xe9t\xe9'", "x.toml", SpecError)


def test_a_mark_is_no_part_of_a_tokenizer_nor_of_its_template(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_text("{}", encoding="utf-8-sig")
    assert tokenizer_files(str(tmp_path / "tokenizer.json")) == {
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{}",
    }
    assert small_files(tmp_path, ["tokenizer.json"]) == {"tokenizer.json": b"{}"}


@pytest.mark.parametrize("way", ["as it is", "with a mark", "Windows"])
def test_a_cut_that_is_written_into_a_file_leaves_its_way_of_writing(
    tmp_path: Path, way: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(WAYS[way](SPEC))
    write_layers(path, [1, 3])
    assert load_spec(path).pipeline.layers == (1, 3)
    added = WAYS[way]("layers = [1, 3]\n").removeprefix(b"\xef\xbb\xbf")
    assert path.read_bytes().replace(added, b"") == WAYS[way](SPEC)


def test_what_does_not_fit_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    write_whole(path, "before")
    with path.open("ab", buffering=0) as file:
        append_whole(file.fileno(), b" and after")
    real = os.write

    def full(descriptor: int, data: memoryview) -> int:
        if len(data) <= 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:4])

    monkeypatch.setattr(os, "write", full)
    with path.open("ab", buffering=0) as file, pytest.raises(OSError, match="No space"):
        append_whole(file.fileno(), b"lines of JSON")
    assert path.read_bytes() == b"before and after"
    monkeypatch.setattr(Path, "write_bytes", lambda self, data: self.touch() or full(0, data[:1]))
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "something longer")
    monkeypatch.undo()
    assert path.read_bytes() == b"before and after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_from_other_errors() -> None:
    assert is_full(OSError(errno.ENOSPC, "x"))
    assert is_full(OSError(errno.EDQUOT, "x"))
    assert is_full(ValueError("I/O error: No space left on device (os error 28)"))
    assert not is_full(OSError(errno.EIO, "x"))
    assert not is_full(ValueError("os error 2"))


def test_lines_go_into_a_pipe_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    lines = LinesFile(path, 8)
    for _ in range(3):
        lines.append(b"a line\n")
    lines.close()
    assert os.read(reader, 100) == b"a line\n" * 3
    os.close(reader)
    assert list(tmp_path.iterdir()) == [path], "nothing is set aside"


def test_what_a_link_leads_to_is_not_set_aside(tmp_path: Path) -> None:
    path, target = tmp_path / "link", tmp_path / "target"
    path.symlink_to(target)
    lines = LinesFile(path, 8)
    for _ in range(3):
        lines.append(b"a line\n")
    lines.close()
    assert target.read_bytes() == b"a line\n" * 3
    assert path.is_symlink()
    assert not older(path).exists()


def test_lines_go_where_their_file_is_now(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "file"
    path.parent.mkdir()
    lines = LinesFile(path, 20)
    lines.append(b"one\n")
    path.rename(path.with_name("moved"))
    lines.append(b"two\n")
    assert path.read_bytes() == b"two\n"
    lines.append(b"a longer line here\n")
    assert (older(path).read_bytes(), path.read_bytes()) == (b"two\n", b"a longer line here\n")
    lines.close()
