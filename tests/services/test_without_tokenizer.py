"""A model of random weights may have no tokenizer: token ids go in and out, and text is refused by name."""

import json
from collections.abc import Iterator

import grpc
import pytest

from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import collect

CONFIG = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 7,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("only-a-config")
    (path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["--load-format", "dummy", "--threads", "1", "--swap-space", "0", "--device", "cpu"]
    with LocalServer(str(path), worker_arguments=arguments) as server:
        yield server.target


async def test_token_ids_go_in_and_come_out(target: str) -> None:
    async with Client(target) as client:
        sampling = SamplingParams(max_tokens=5, ignore_eos=True)
        first, second = [await collect(client, [1, 2, 3], sampling) for _ in range(2)]
        model = await client.get_model()
    assert len(first.outputs[0].token_ids) == 5
    assert first.outputs == second.outputs
    assert first.outputs[0].text == ""
    assert (model.vocabulary_size, list(model.eos_token_ids), model.has_chat_template) == (100, [7], False)


async def test_what_is_about_text_is_refused_by_its_name(target: str) -> None:
    async with Client(target) as client:
        sentence = "is not possible with this model: it has no tokenizer; use token ids"
        for name, call in {
            "text": collect(client, "hello", SamplingParams()),
            "chat": collect(client, [{"role": "user", "content": "hello"}], SamplingParams()),
            "sampling.stop": collect(client, [1], SamplingParams(stop=["."])),
            "sampling.bad_words": collect(client, [1], SamplingParams(bad_words=["no"])),
            "detokenizing": client.detokenize([1]),
        }.items():
            with pytest.raises(grpc.aio.AioRpcError, match=f"{name} {sentence}") as error:
                await call
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
