"""API keys: the file, what a call shows, and how much each key may ask for."""

import hashlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire_common.calls.errors import RequestError
from scheduler_service.access.keys import MAX_BYTES, ApiKey, Keyring, digest_of, parse_keys, read_keys
from scheduler_service.engine.calls.admission import Quotas

DIGEST = hashlib.sha256(b"secret").hexdigest()


def entry(**fields: object) -> str:
    values = {"id": "one", "sha256": DIGEST, "tenant": "gold"} | fields
    return "\n".join(["[[key]]", *(f"{name} = {json.dumps(value)}" for name, value in values.items()), ""])


def test_a_file_says_what_a_key_may() -> None:
    (key,) = parse_keys(entry(weight=2, requests_per_minute=5, concurrency=3, models=["m"], adapters=["a"], admin=True))
    assert key == ApiKey(
        id="one",
        digest=digest_of("secret"),
        tenant="gold",
        weight=2.0,
        requests_per_minute=5,
        concurrency=3,
        models=frozenset({"m"}),
        adapters=frozenset({"a"}),
        admin=True,
    )
    key.check_model("m")
    with pytest.raises(RequestError, match="may not use the model 'other'"):
        key.check_model("other")
    for name in ("", "a"):
        key.check_adapter(name)
    with pytest.raises(RequestError, match="may not use the adapter 'other'"):
        key.check_adapter("other")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[[key]]\n", r"key\[0\]\.id: Field required"),
        (entry(id=""), r"key\[0\]\.id: String should have at least 1"),
        (entry(sha256="secret"), r"key\[0\]\.sha256: String should match"),
        (entry(weight=0), r"key\[0\]\.weight: Input should be greater than 0"),
        (entry(concurrency=0), r"key\[0\]\.concurrency: .*greater than or equal to 1"),
        (entry(admin="yes"), r"key\[0\]\.admin: Input should be a valid boolean"),
        (entry(tenent="gold"), r"key\[0\]\.tenent: Extra inputs"),
        (entry(tenant="a b"), r"key\[0\]\.tenant: String should match"),
        ("key = 1\n", "key: Input should be a valid list"),
        ("keys = []\n", "keys: Extra inputs"),
        ("[[key]\n", "Expected"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, place: str) -> None:
    with pytest.raises(ValueError, match=place):
        parse_keys(text)


def test_keys_that_contradict_each_other_are_refused() -> None:
    other = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(ValueError, match="two keys have the id 'one'"):
        Keyring(parse_keys(entry() + entry(sha256=other)))
    with pytest.raises(ValueError, match="the key 'two' is there twice"):
        Keyring(parse_keys(entry() + entry(id="two")))
    with pytest.raises(ValueError, match="keys of the tenant 'gold' have different weights"):
        Keyring(parse_keys(entry(weight=2) + entry(id="two", sha256=other)))


def test_the_key_of_the_environment_may_do_everything() -> None:
    key = read_keys(None, " plain \n").find("plain")
    assert key is not None
    assert key.admin
    assert key.metrics
    with pytest.raises(ValueError, match="is empty"):
        read_keys(None, " ")


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        None,
        (("authorization", ""),),
        (("authorization", "secret"),),
        (("authorization", "Basic secret"),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer secre"),),
        (("authorization", "Bearer secretx"),),
        (("authorization", "Bearer é"),),
        (("authorization", b"Bearer secret"),),
        (("authorization", "Bearer secret"), ("authorization", "Bearer secret")),
        (("authorization-bin", "Bearer secret"),),
    ],
)
def test_only_the_key_itself_is_the_key(metadata: tuple[tuple[str, str], ...] | None) -> None:
    keyring = Keyring(parse_keys(entry()))
    with pytest.raises(RequestError) as error:
        keyring.authenticate(metadata)
    assert error.value.code is grpc.StatusCode.UNAUTHENTICATED
    assert "secret" not in str(error.value)
    for scheme in ("Bearer", "bearer"):
        assert keyring.authenticate((("x", "y"), ("authorization", f"{scheme} secret"))).id == "one"


def test_front_ends_know_of_the_keys_what_they_need() -> None:
    keyring = Keyring(
        parse_keys(entry(models=[], adapters=["a"]) + entry(id="two", sha256=hashlib.sha256(b"x").hexdigest()))
    )
    decoded = Keyring.decode(keyring.encode())
    known = [(key.id, key.digest, key.tenant, key.models, key.adapters) for key in keyring.by_id.values()]
    assert [(key.id, key.digest, key.tenant, key.models, key.adapters) for key in decoded.by_id.values()] == known
    assert b"secret" not in keyring.encode().SerializeToString()


def test_a_new_key_fits_its_lines() -> None:
    command = [sys.executable, "-m", "pagewire_client", "new-key", "alice@home", "--tenant", "alice"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    (entry,) = tomllib.loads(result.stdout)["key"]
    secret = result.stderr.split()[-1]
    assert (entry["id"], entry["tenant"]) == ("alice@home", "alice")
    assert secret not in result.stdout
    keyring = Keyring(parse_keys(result.stdout))
    assert keyring.find(secret) is keyring.by_id["alice@home"]


# ---- quotas


def quotas(**limits: int) -> Quotas:
    return Quotas(Keyring([ApiKey(id="a", digest=digest_of("a"), tenant="", **limits)]))  # type: ignore[arg-type]


def refusal(of: Quotas, now: float, *, is_request: bool = True) -> str:
    try:
        of.admit("a", now, is_request=is_request)
    except RequestError as error:
        return f"{error.code.name}: {error}"
    return ""


def test_a_key_has_a_number_of_requests_in_flight() -> None:
    one = quotas(concurrency=2)
    assert [refusal(one, 0.0)[:18] for _ in range(3)] == ["", "", "RESOURCE_EXHAUSTED"]
    assert not refusal(one, 0.0, is_request=False)  # calls beside requests are none
    one.leave("a")
    assert not refusal(one, 0.0)
    assert "2 requests in flight" in refusal(one, 0.0)


def test_a_minutes_requests_come_back_evenly() -> None:
    one = quotas(requests_per_minute=6)
    assert not any(refusal(one, 100.0) for _ in range(6))
    assert "6 requests a minute; try again in 10.0 s" in refusal(one, 100.0)
    assert "try again in 0.5 s" in refusal(one, 109.5)
    assert not refusal(one, 110.0)
    assert refusal(one, 110.0)
    assert not any(refusal(one, 1000.0) for _ in range(6))  # a minute's worth, however long it was idle
    assert refusal(one, 1000.0)


def test_a_request_may_take_more_tokens_than_are_left_and_then_time_makes_up_for_it() -> None:
    one = quotas(tokens_per_minute=60)
    assert not refusal(one, 0.0)
    one.use_tokens("a", 200)
    assert "60 tokens a minute; try again in 141.0 s" in refusal(one, 0.0)
    assert refusal(one, 140.0)
    assert not refusal(one, 141.0)


def test_a_key_that_is_gone_opens_nothing_and_leaves_nothing_once_what_it_used_has_come_back() -> None:
    one = quotas(concurrency=1, tokens_per_minute=60)
    assert not refusal(one, 0.0)
    one.set_keys(Keyring([]), 0.0)
    assert refusal(one, 0.0).startswith("UNAUTHENTICATED")
    one.leave("a")
    one.use_tokens("a", 5)
    for now, num_kept in ((4.0, 1), (6.0, 0)):
        one.set_keys(Keyring([]), now)
        assert len(one._uses) == num_kept
    one.use_tokens("a", 5)
    assert not one._uses


def test_a_key_that_is_put_in_again_has_used_what_it_had_used() -> None:
    one = quotas(concurrency=1, tokens_per_minute=60)
    ring = one._keyring
    assert ring is not None
    assert not refusal(one, 0.0)
    one.set_keys(Keyring([]), 1.0)
    one.use_tokens("a", 200)  # a stream of before ends
    one.set_keys(ring, 2.0)
    assert "1 requests in flight" in refusal(one, 2.0)
    one.leave("a")
    assert "60 tokens a minute" in refusal(one, 139.0)
    assert not refusal(one, 141.0)


def test_a_limit_that_comes_later_begins_with_nothing_used() -> None:
    one = quotas()
    for _ in range(100):
        assert not refusal(one, 0.0)
    one.use_tokens("a", 50_000_000)
    limited = ApiKey(id="a", digest=digest_of("a"), tenant="", requests_per_minute=5, tokens_per_minute=10)
    one.set_keys(Keyring([limited]), 0.0)
    assert not refusal(one, 1.0)


def test_a_request_that_takes_the_place_of_a_broken_one_needs_no_other() -> None:
    one = quotas(concurrency=1)
    assert not refusal(one, 0.0)
    assert refusal(one, 0.0)
    one.admit("a", 0.0, is_request=True, takes_place=True)
    one.leave("a")
    assert refusal(one, 0.0)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "keys.toml").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ValueError, match=f"has {MAX_BYTES + 1} bytes"):
        read_keys(tmp_path / "keys.toml", None)


@pytest.mark.parametrize("arguments", [("alice laptop",), ("",), ("a", "--tenant", "b c"), ("x" * 65,)])
def test_a_new_key_that_would_be_refused_is_not_made(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pagewire_client", "new-key", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert "it may have up to 64" in result.stderr


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 40)), max_size=60),
)
def test_no_minute_has_more_requests_than_two_minutes_worth(most: int, arrivals: list[tuple[float, int]]) -> None:
    """A full bucket and what comes back while it is emptied."""
    one, now, admitted = quotas(requests_per_minute=most), 0.0, []
    for pause, count in arrivals:
        now += pause
        admitted += [now for _ in range(count) if not refusal(one, now)]
    for start in admitted:
        assert sum(start <= at < start + 60 for at in admitted) <= 2 * most
