"""What tokenizer_config.json says beside tokenizer.json is obeyed, refused by a sentence that names it, or told of."""

import json
import re
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pagewire_common.model_files.tokenizer_config import _LEFT_OUT, _OBEYED, _STANDARD, TokenizerConfig
from pagewire_common.start_error import StartError
from scheduler_service.frontend.rendering.chat_input import ChatInput
from scheduler_service.frontend.rendering.chat_template import ChatTemplate
from scheduler_service.frontend.text.tokenization import TextFit, Tokenizer
from scheduler_service.frontend.text.tokenizer_loading import load_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SIZE = 3 + len(ALPHABET)
"""The first id that tokenizer.json has no token for."""


def write(folder: Path, config: dict[str, Any] | None = None, **files: object) -> Path:
    """Single bytes, with three tokens of names, two of them special; and other files of the folder."""
    names = ["<s>", "</s>", "<tool>"]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate([*names, *ALPHABET])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(names[:2])
    backend.add_tokens(names[2:])
    backend.save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config": config or {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def change(folder: Path, **parts: object) -> None:
    """Other parts for tokenizer.json."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))


BYTES = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TEXTS = ["a<s>b</s> c", "<tool> a <tool>", "a <x> b<x>", " <y>  a<y> ", "a<z>b", "[image]<pad>"]
CONFIGS: dict[str, dict[str, Any]] = {
    "none": {},
    "names": {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "pad_token": None},
    "tokens with ids": {"added_tokens_decoder": {str(SIZE): {"content": "<x>", "special": False}}},
    "tokens with properties": {
        "added_tokens_decoder": {
            str(SIZE): {"content": "<x>", "lstrip": True, "normalized": False, "special": True},
            str(SIZE + 1): {"content": "<y>", "rstrip": True, "single_word": True, "special": False},
            "2": {"content": "<tool>", "rstrip": True, "special": True},
        }
    },
    "a list of others": {"additional_special_tokens": ["<tool>", "a"]},
    "others by name": {"extra_special_tokens": {"tool_token": "<tool>"}},
    "a name of the model's own": {"image_token": "<tool>", "bos_token": "<s>"},
    "special tokens are split": {"split_special_tokens": True, "bos_token": "<s>"},
}


@pytest.mark.parametrize("name", CONFIGS)
async def test_tokens_are_added_and_special_as_in_transformers(name: str, tmp_path: Path) -> None:
    """In its class without code of its own, which is the one that takes tokenizer.json as it is."""
    ours = Tokenizer(write(tmp_path, CONFIGS[name]))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = await ours.encode(text, parse_special_tokens=True)
        assert ids == theirs.encode(text), text
        assert await ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_id == theirs.eos_token_id
    source = "{{ bos_token }},{{ eos_token }},{{ image_token }},{{ tool_token }}"
    (tmp_path / "chat_template.jinja").write_text(source)
    chats = Tokenizer(tmp_path)._chats
    assert chats is not None
    rendered = ChatTemplate(chats.source, chats.variables).render({"messages": []}, 1000)
    assert rendered == theirs.apply_chat_template([{"role": "user"}], chat_template=source, tokenize=False)


async def test_older_folders_have_these_parts_in_files_of_their_own(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"eos_token": "a"},
        special_tokens_map={"eos_token": {"content": "</s>", "lstrip": False}, "extra_special_tokens": ["<x>"]},
        added_tokens={"<x>": SIZE},
    )
    ours, theirs = Tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        assert await ours.encode(text, parse_special_tokens=True) == theirs.encode(text), text
    assert ours.eos_token_id == theirs.eos_token_id == 1
    ids = [SIZE, *await ours.encode("a")]
    assert await ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


async def test_a_special_token_without_an_id_is_text_and_told_of(tmp_path: Path) -> None:
    """transformers would give it the next id, which is none that the model was trained with."""
    with capture_logs() as logs:
        tokenizer = Tokenizer(write(tmp_path, {"pad_token": "<pad>", "eos_token": "<end>"}))
    assert [log["tokens"] for log in logs] == [["<end>", "<pad>"]]
    assert len(await tokenizer.encode("<pad>", parse_special_tokens=True)) == len("<pad>")
    assert tokenizer.eos_token_id is None


@pytest.mark.parametrize("key", ["chat_control_tokens", "additional_special_tokens"])
async def test_control_tokens_that_a_user_spells_out_are_text(key: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("<tool>{{ messages[0].content }}<tool>")
    tokenizer = Tokenizer(write(tmp_path, {key: ["<tool>", "<none>"]}))
    ids = (await tokenizer.encode_chat(ChatInput([("user", "a<tool>b", "")]))).token_ids
    assert [position for position, token_id in enumerate(ids) if token_id == 2] == [0, len(ids) - 1]
    assert await tokenizer.decode(ids, skip_special_tokens=True) == "<tool>a<tool>b<tool>"


@pytest.mark.parametrize("truncates_left", [True, False])
async def test_a_text_is_cut_at_the_side_that_the_model_has_cut(truncates_left: bool, tmp_path: Path) -> None:
    config = {"truncation_side": "left"} if truncates_left else {}
    tokenizer = Tokenizer(write(tmp_path, config))
    text = "".join(chr(ord("a") + number % 26) for number in range(10_000))
    for most in (7, 5_000, 9_999):
        (cut,) = await tokenizer.encode_texts([text], TextFit(most, cuts=True))
        kept = text[-most:] if truncates_left else text[:most]
        assert await tokenizer.decode(cut.token_ids, skip_special_tokens=False) == kept
        last, pair = await tokenizer.encode_texts([text, ("abc", text)], TextFit(most, cuts=True, keeps_end=True))
        assert await tokenizer.decode(last.token_ids, skip_special_tokens=False) == text[-most:]
        assert await tokenizer.decode(pair.token_ids, skip_special_tokens=False) == "abc" + text[3 - most :]


NAMED = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]


@pytest.mark.parametrize(
    ("of_file", "of_config", "of_processor", "expected"),
    [
        ("f", "c", "p", "f"),
        (None, "c", "p", "c"),
        (None, NAMED, None, "d"),
        (None, {"default": "d", "rag": "r"}, None, "d"),
        (None, NAMED[:1], None, None),
        (None, None, "p", "p"),
        (None, "", None, None),
        (None, None, None, None),
    ],
)
def test_the_chat_template_is_taken_from_where_it_is(
    of_file: str | None, of_config: object, of_processor: str | None, expected: str | None, tmp_path: Path
) -> None:
    files = {} if of_processor is None else {"chat_template": {"chat_template": of_processor}}
    write(tmp_path, {} if of_config is None else {"chat_template": of_config}, **files)
    if of_file is not None:
        (tmp_path / "chat_template.jinja").write_text(of_file)
    with capture_logs() as logs:
        chats = Tokenizer(tmp_path)._chats
    assert (chats and chats.source) == expected
    assert [log["names"] for log in logs] == ([["rag"]] if of_config == NAMED[:1] else [])


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"bos_token": 1}, r"has 1 in 'bos_token'; it must be a token"),
        ({"eos_token": {"id": 1}}, r"in 'eos_token'; it must be a token"),
        ({"eos_token": {"content": "</s>", "glow": True}}, r"'glow' of the token '</s>' in 'eos_token'"),
        ({"extra_special_tokens": "<x>"}, r"in extra_special_tokens; it must be a list or an object"),
        ({"added_tokens_decoder": [1]}, r"in added_tokens_decoder; it must be an object"),
        ({"added_tokens_decoder": {"x": {"content": "<x>"}}}, r"the added token id 'x', which is no token id"),
        ({"added_tokens_decoder": {"01": {"content": "</s>"}}}, r"the added token id '01', which is no token id"),
        ({"added_tokens_decoder": {"\u0661": {"content": "</s>"}}}, r"the added token id '\u0661', which is no token"),
        (
            {"added_tokens_decoder": {"9" * 5_000: {"content": "<x>"}}},
            r"the added token id '99.*99', which is",
        ),
        ({"bos_token": "a\ud800"}, r"half of a surrogate pair in 'bos_token', 'a\\ud800'"),
        ({"added_tokens_decoder": {"1": {"content": "\udfff"}}}, r"half of a surrogate pair in 'added_tokens_decoder'"),
        ({"extra_special_tokens": {"a_token": "\ud800"}}, r"half of a surrogate pair in 'extra_special_tokens'"),
        ({"chat_template": "\ud800"}, r"half of a surrogate pair in 'chat_template'"),
        ({"chat_template": [{"name": [], "template": "t"}]}, r"a chat_template named \[\]; names must be texts"),
        (
            {"chat_template": [NAMED[1], NAMED[1]]},
            r"a chat_template named 'default'; names must be texts, and each",
        ),
        ({"bos_token": [[[[[[[[1]]]]]]]]}, r"has \[.*\] in 'bos_token'; it must be a token"),
        (
            {"added_tokens_decoder": {str(SIZE + 1): {"content": "<x>"}}},
            rf"gives the token '<x>' the id {SIZE + 1}, and in tokenizer\.json it is {SIZE}",
        ),
        (
            {"added_tokens_decoder": {"1": {"content": "<tool>"}}},
            r"gives the token '<tool>' the id 1, and in tokenizer\.json it is 2",
        ),
        ({"truncation_side": "top"}, r"'top' as truncation_side"),
        ({"split_special_tokens": "no"}, r"'no' in split_special_tokens; it must be true or false"),
        ({"add_bos_token": "no"}, r"'no' in add_bos_token; it must be true or false"),
        ({"chat_control_tokens": "<x>"}, r"in chat_control_tokens; it must be a list"),
        ({"chat_template": [1]}, r"chat_template that is neither a text nor a list"),
        ({"fix_mistral_regex": True}, r"fix_mistral_regex, and tokenizer\.json has the pattern that it replaces"),
    ],
)
def test_what_makes_no_sense_is_refused(config: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=sentence):
        Tokenizer(write(tmp_path, config))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        (
            "tokenizer_config.json",
            '{"bos_token": "a", "bos_token": "b"}',
            "'bos_token' is there twice, as 'a' and as",
        ),
        ("added_tokens.json", '{"<s>": 0, "a": 0}', "give the id 0 to two tokens, '<s>' and 'a'"),
        ("added_tokens.json", '{"<s>": true}', "the added token id True, which is no token id"),
        ("chat_template.jinja", b"\xe9", "chat_template.jinja is not in UTF-8: unexpected end of data at byte 0"),
        ("tokenizer_config.json", b"\xe9", "tokenizer_config.json is not in UTF-8"),
    ],
)
def test_what_files_say_twice_or_not_in_unicode_is_refused(
    name: str, text: str | bytes, sentence: str, tmp_path: Path
) -> None:
    (write(tmp_path) / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(StartError, match=sentence):
        Tokenizer(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["content", "1", "a"]), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*_STANDARD, *_OBEYED, "x_token", "other"]), JSON, max_size=4))
def test_whatever_a_config_says_it_is_read_or_refused(config: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer_config.json"
        file.write_text(json.dumps(config))
        with suppress(StartError):
            TokenizerConfig.read({file.name: file})


def test_what_a_file_says_twice_alike_is_read(tmp_path: Path) -> None:
    (write(tmp_path) / "tokenizer_config.json").write_text('{"eos_token": "</s>", "eos_token": "</s>"}')
    assert Tokenizer(tmp_path).eos_token_id == 1


def test_special_tokens_of_both_lists_are_special(tmp_path: Path) -> None:
    """transformers drops the older list where there is the newer one."""
    for newer in (["a"], {"letter_token": "a"}):
        config = {"extra_special_tokens": newer, "additional_special_tokens": ["<tool>", {"content": "a"}]}
        assert {"a", "<tool>"} <= {*load_tokenizer(write(tmp_path, config)).hidden}


def model(vocabulary: dict[str, int]) -> dict[str, Any]:
    return {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}


ADDED: dict[str, Any] = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (
            {"model": model({"a": 2**32 - 1}), "added_tokens": []},
            r"give the token 'a' the id 4294967295; tokenizer.json has 1 tokens, and ids must be below 65537",
        ),
        ({"model": model({"a": 2**31}), "added_tokens": []}, "give the token 'a' the id 2147483648"),
        ({"model": model({"a": 0, "b": 0}), "added_tokens": []}, "gives the id 0 to two tokens, 'a' and 'b'"),
        (
            {"model": model({"a": 0}), "added_tokens": [{"id": 5, "content": "b", **ADDED}]},
            "gives the added token 'b' the id 5, and elsewhere 1",
        ),
        (
            {"model": model({"a": 0}), "added_tokens": [{"id": 1, "content": c, **ADDED} for c in "bc"]},
            "gives the added token 'c' the id 1, and elsewhere 2",
        ),
    ],
)
def test_ids_that_are_not_what_the_file_states_or_far_beyond_its_tokens_are_refused(
    parts: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    change(write(tmp_path), pre_tokenizer=None, decoder=None, **parts)
    with pytest.raises(StartError, match=sentence):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '"a"', "[" * 99_999])
def test_a_config_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(StartError, match=r"^tokenizer_config\.json is not"):
        Tokenizer(tmp_path)


def test_unknown_keys_are_told_of(tmp_path: Path) -> None:
    reasons = [key for keys in _LEFT_OUT.values() for key in keys]
    with capture_logs() as logs:
        Tokenizer(write(tmp_path, dict.fromkeys(reasons, 7)))
        assert logs == []
        Tokenizer(write(tmp_path, {"unheard_of": 1, "b": {}, "legacy": True}))
    assert [log["keys"] for log in logs] == [["b", "unheard_of"]]
    assert len(reasons) == len({*reasons})


@pytest.mark.parametrize("key", ["bos_token", "eos_token"])
@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("puts", [True, False])
async def test_what_is_put_around_a_text_is_tokenizer_jsons_and_another_wish_is_told_of(
    key: str, wanted: bool, puts: bool, tmp_path: Path
) -> None:
    write(tmp_path, {"bos_token": "<s>", "eos_token": "</s>", f"add_{key}": wanted})
    token = {"bos_token": "<s>", "eos_token": "</s>"}[key]
    if puts:
        backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        single = f"{token} $A" if key == "bos_token" else f"$A {token}"
        backend.post_processor = processors.TemplateProcessing(single, None, [(token, backend.token_to_id(token))])
        backend.save(str(tmp_path / "tokenizer.json"))
    with capture_logs() as logs:
        tokenizer = Tokenizer(tmp_path)
    assert len(await tokenizer.encode("ab")) == 2 + puts
    assert [f"add_{key}" in log["event"] for log in logs] == ([] if wanted == puts else [True])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: token, f"add_{key}": puts, "bos_token": token}))
    with capture_logs() as logs:
        Tokenizer(tmp_path)  # whose one token is both ends
    assert logs == []
    assert await tokenizer.encode("ab") == PreTrainedTokenizerFast.from_pretrained(tmp_path).encode("ab")


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"pre_tokenizer": {"type": "ByteLevel", **BYTES, "keeps": 1}}, "'keeps' in pre_tokenizer"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse", "a": 0}]}}, r"'a' in decoder\.decoders\[0\]"),
        ({"normalizer": {"type": "NFC", "form": "D"}}, "'form' in normalizer"),
    ],
)
def test_what_the_library_would_drop_of_tokenizer_json_is_refused(
    parts: dict[str, Any], named: str, tmp_path: Path
) -> None:
    change(write(tmp_path), **parts)
    with pytest.raises(StartError, match=rf"^tokenizer\.json has {named}, which this release"):
        Tokenizer(tmp_path)


def test_merges_that_are_left_out_at_random_are_refused(tmp_path: Path) -> None:
    model = json.loads((write(tmp_path) / "tokenizer.json").read_text())["model"]
    change(tmp_path, model=model | {"dropout": 0.0})
    Tokenizer(tmp_path)
    change(tmp_path, model=model | {"dropout": 0.1})
    with pytest.raises(StartError, match=r"^tokenizer\.json has dropout 0\.1 in model, "):
        Tokenizer(tmp_path)


def test_a_tokenizer_json_of_a_former_release_is_read(tmp_path: Path) -> None:
    former = {"type": "Metaspace", "replacement": "\u2581", "str_rep": "\u2581", "add_prefix_space": True}
    change(write(tmp_path), pre_tokenizer=former, decoder=former)
    assert Tokenizer(tmp_path).has_chat_template is False


def test_a_tokenizer_json_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    change(write(tmp_path), model={"type": "Oracle"})
    with pytest.raises(StartError, match=r"^tokenizer\.json cannot be read: "):
        Tokenizer(tmp_path)


def test_the_pattern_that_mistral_corrected_is_seen(tmp_path: Path) -> None:
    pattern = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\p{N}"
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    change(write(tmp_path, {"fix_mistral_regex": True}), pre_tokenizer=split)
    Tokenizer(tmp_path)


def test_no_key_is_both_obeyed_and_left_out() -> None:
    source = Path(TokenizerConfig.read.__code__.co_filename).read_text()
    obeyed = re.findall(r'config\.get\("(\w+)"', source)
    assert obeyed
    assert not {*obeyed} & {key for keys in _LEFT_OUT.values() for key in keys}
