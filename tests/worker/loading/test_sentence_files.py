"""What a folder of sentence-transformers says, and which of it cannot be followed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_encoder import write_modules

from pagewire_common.model_files.sentence_config import SentenceConfig
from pagewire_common.start_error import StartError
from worker_service.loading.sentence_files import SentenceSettings


def test_without_modules_the_family_says_how_and_vectors_are_1_long(tmp_path: Path) -> None:
    assert SentenceSettings.read(tmp_path, "LAST") == SentenceSettings("LAST", True, None)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("cls_token", "CLS"), ("mean_tokens", "MEAN"), ("lasttoken", "LAST")],
)
def test_pooling_norm_and_length_are_read(mode: str, expected: str, tmp_path: Path) -> None:
    write_modules(tmp_path, mode, "Normalize", max_length=40)
    assert SentenceSettings.read(tmp_path, "ALL") == SentenceSettings(expected, True, 40)
    write_modules(tmp_path, mode)
    assert not SentenceSettings.read(tmp_path, "ALL").normalizes


def test_the_newer_form_of_a_pooling_is_read(tmp_path: Path) -> None:
    write_modules(tmp_path, "mean_tokens")
    (tmp_path / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 48, "pooling_mode": "cls"}')
    assert SentenceSettings.read(tmp_path, "ALL").pooling == "CLS"


network = {"type": "sentence_transformers.models.Transformer", "path": ""}
pooling = {"type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling", "path": "1_Pooling"}
norm = {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}


def write(folder: Path, *modules: dict[str, object]) -> None:
    (folder / "modules.json").write_text(json.dumps(modules))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "another pooling": (lambda folder: write_modules(folder, "max_tokens"), "pools by 'max'"),
    "a layer more": (
        lambda folder: write_modules(folder, "mean_tokens", "Dense"),
        "the modules \\['Transformer', 'Pooling', 'Dense'\\]; supported are Transformer and Pooling",
    ),
    "a layer twice": (lambda folder: write_modules(folder, "mean_tokens", "Normalize", "Normalize"), "the modules"),
    "no pooling": (lambda folder: (folder / "modules.json").write_text("[]"), r"the modules \[\];"),
    "many layers": (lambda folder: write(folder, *[network] * 9), "names 9 modules"),
    "a large list": (lambda folder: write(folder, *[network] * 30_000), "at most 1048576 are read"),
    "no network": (lambda folder: write(folder, pooling), "the modules \\['Pooling'\\]"),
    "another order": (lambda folder: write(folder, pooling, network), "the modules \\['Pooling', 'Transformer'\\]"),
    "a network elsewhere": (
        lambda folder: write(folder, network | {"path": "0_Transformer"}, pooling),
        "has the network in '0_Transformer'; it must be in this folder",
    ),
    "a pooling in a number": (
        lambda folder: write(folder, network, pooling | {"path": 1}),
        "has the pooling or the norm in 1",
    ),
    "code of its own": (
        lambda folder: write(folder, network | {"type": "custom_st.Transformer"}, pooling),
        "the modules \\['custom_st.Transformer', 'Pooling'\\]",
    ),
    "a module's arguments": (
        lambda folder: write(folder, network | {"kwargs": ["task"]}, pooling),
        "kwargs is .'task'",
    ),
    "an unknown word of a module": (
        lambda folder: write(folder, network, pooling | {"x": 1}),
        "has 'x' = 1, which is",
    ),
    "a norm of something else": (
        lambda folder: (
            write_modules(folder, "mean_tokens", "Normalize"),
            put(folder / "2_Normalize/config.json", {"module_input_name": "token_embeddings"}),
        ),
        "module_input_name is 'token_embeddings', which is not supported; it must be 'sentence_embedding'",
    ),
    "a norm in a number": (lambda folder: write(folder, network, pooling, norm | {"path": 2}), "or the norm in 2"),
    **{
        f"network's {settings}": (
            lambda folder, settings=settings: put(
                write_modules(folder, "mean_tokens") / "sentence_bert_config.json", settings
            ),
            sentence,
        )
        for settings, sentence in (
            ('{"do_lower_case": true}', "do_lower_case is True, which is not supported; it must be False"),
            ('{"do_lower_case": 0}', "do_lower_case is 0"),
            ('{"max_seq_len": 8}', "has 'max_seq_len' = 8, which is unknown"),
            ('{"max_seq_length": 8.0}', "max_seq_length is 8.0"),
            ('{"query_length": 32}', "query_length is 32, which is not supported; it must be null"),
            ('{"transformer_task": "fill-mask"}', "transformer_task is 'fill-mask'"),
            ('{"modality_config": {"text": {"method": "get_text_features"}}}', "modality_config is "),
            ('{"tokenizer_args": {"add_bos_token": true}}', "tokenizer_args is {'add_bos_token': True}"),
        )
    },
    **{
        f"pooling's {settings}": (
            lambda folder, settings=settings: put(
                write_modules(folder, "mean_tokens") / "1_Pooling/config.json", settings
            ),
            sentence,
        )
        for settings, sentence in (
            ('{"pooling_mode": "mean", "include_prompt": false}', "include_prompt is False, which is not supported"),
            ('{"pooling_mode": "mean", "dropout": 1}', "has 'dropout' = 1, which is unknown"),
            ('{"pooling_mode_mean_tokens": "true"}', "pooling_mode_mean_tokens is 'true'; it must be true or false"),
            ('{"pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": true}', "pools by 'max' and 'mean'"),
            ('{"pooling_mode": "cls", "pooling_mode_mean_tokens": true}', "pools by 'cls' and 'mean'"),
            ('{"pooling_mode": ["mean", "cls"]}', "pools by 'cls' and 'mean'"),
            ('{"pooling_mode": 3}', "pools by '3'"),
            ("{}", "pools by nothing"),
        )
    },
    "no list": (lambda folder: (folder / "modules.json").write_text("{}"), "is not a list of modules"),
    "no JSON": (lambda folder: (folder / "modules.json").write_text("["), "modules.json is not JSON"),
    "no folder of it": (
        lambda folder: write(folder, network, pooling | {"path": "nowhere"}),
        "cannot read",
    ),
    "a length of no tokens": (
        lambda folder: write_modules(folder, "mean_tokens", max_length=0),
        "max_seq_length is 0",
    ),
}


def put(file: Path, content: str | dict[str, object]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))


def test_what_newer_releases_write_is_read_and_older_names_too(tmp_path: Path) -> None:
    """As sentence-transformers 6.2 saves a model, and as 0.3 did."""
    write_modules(tmp_path, "mean_tokens", "Normalize")
    put(
        tmp_path / "1_Pooling/config.json",
        {"embedding_dimension": 4, "pooling_mode": ["lasttoken"], "include_prompt": True},
    )
    put(tmp_path / "2_Normalize/config.json", {"module_input_name": "sentence_embedding", "module_output_name": None})
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    said = {"transformer_task": "feature-extraction", "modality_config": {"text": text}, "processing_kwargs": {}}
    put(tmp_path / "sentence_roberta_config.json", {"max_seq_length": 128})
    assert SentenceSettings.read(tmp_path, "ALL") == SentenceSettings("LAST", True, 128)
    put(tmp_path / "sentence_bert_config.json", said | {"module_output_name": "token_embeddings", "unpad_inputs": None})
    assert SentenceSettings.read(tmp_path, "ALL") == SentenceSettings("LAST", True, None)


def test_a_classifier_is_a_network_alone_with_a_length(tmp_path: Path) -> None:
    said = {"max_seq_length": 12, "transformer_task": "sequence-classification", "module_output_name": "scores"}
    write(tmp_path, network)
    put(tmp_path / "sentence_bert_config.json", said)
    assert SentenceSettings.read(tmp_path, "MEAN", {}, 1).max_length == 12
    with pytest.raises(StartError, match="transformer_task is 'sequence-classification'"):
        SentenceSettings.read(write_modules(tmp_path, "mean_tokens"), "MEAN")
    with pytest.raises(StartError, match="supported are Transformer alone, for a classifier"):
        SentenceSettings.read(tmp_path, "MEAN", {}, 1)


IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("config", "sentences", "num_labels", "expected"),
    [
        ({}, {}, 1, SentenceConfig()),
        ({}, {"activation_fn": IDENTITY, "model_type": "CrossEncoder"}, 1, SentenceConfig(scores_plainly=True)),
        ({"sentence_transformers": {"activation_fn": SIGMOID, "version": "4.0.1"}}, {}, 1, SentenceConfig()),
        ({"sbert_ce_default_activation_function": "torch.nn.Identity"}, {}, 2, SentenceConfig(scores_plainly=True)),
        ({}, {"similarity_fn_name": "dot", "model_type": "SentenceTransformer"}, 0, SentenceConfig("dot")),
        ({}, {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "document"}, 0, SentenceConfig()),
        ({}, {"__version__": {"pytorch": "2"}, "default_prompt_name": None, "truncate_dim": None}, 0, SentenceConfig()),
    ],
)
def test_similarities_and_activations_are_read(
    config: dict[str, Any], sentences: dict[str, Any], num_labels: int, expected: SentenceConfig
) -> None:
    assert SentenceConfig.read(config, sentences, num_labels) == expected


@pytest.mark.parametrize(
    ("config", "sentences", "num_labels", "sentence"),
    [
        ({}, {"prompts": {"query": "q: "}, "default_prompt_name": "query"}, 0, "every text would begin with 'q: '"),
        ({}, {"default_prompt_name": "query"}, 0, "default_prompt_name is 'query', which is not among its prompts"),
        ({}, {"prompts": ["q: "]}, 0, "prompts is .'q: '.; it must be an object of texts"),
        ({}, {"similarity_fn_name": "jaccard"}, 0, "similarity_fn_name is 'jaccard'; it must be cosine, dot, euc"),
        ({}, {"similarity_fn_name": ["dot"]}, 0, "similarity_fn_name is .'dot'.; it must be"),
        ({}, {"truncate_dim": 64}, 0, "truncate_dim is 64, which is not supported: a request says `dimensions`"),
        ({}, {"model_type": "SparseEncoder"}, 0, "model_type is 'SparseEncoder'; this network can be a SentenceTr"),
        (
            {},
            {"model_type": "SentenceTransformer"},
            1,
            "model_type is 'SentenceTransformer'; this network can be a Cross",
        ),
        ({}, {"dropout": 1}, 0, "says 'dropout' = 1, which is not known"),
        (
            {},
            {"activation_fn": "torch.nn.modules.activation.Tanh"},
            1,
            "activation_fn is 'torch.nn.modules.activation.T",
        ),
        (
            {"sentence_transformers": {"activation_fn": "my.code.Identity"}},
            {},
            1,
            "activation_fn is 'my.code.Identity'",
        ),
        ({"sentence_transformers": "Identity"}, {}, 1, "sentence_transformers is 'Identity'; it must be an object"),
        (
            {"sbert_ce_default_activation_function": 3},
            {},
            1,
            "sbert_ce_default_activation_function is 3; supported are",
        ),
        ({"sbert_ce_default_activation_function": SIGMOID}, {}, 2, "over two classes; the score of two classes is"),
        (
            {"sbert_ce_default_activation_function": SIGMOID, "sentence_transformers": {"activation_fn": IDENTITY}},
            {},
            1,
            "activation_fn is Identity and config.json: sbert_ce_default_activation_function is Sigmoid; remove",
        ),
    ],
)
def test_what_changes_every_vector_or_score_and_cannot_be_obeyed_is_refused(
    config: dict[str, Any], sentences: dict[str, Any], num_labels: int, sentence: str, tmp_path: Path
) -> None:
    """By the worker, at its start."""
    put(tmp_path / "config_sentence_transformers.json", sentences)
    with pytest.raises(StartError, match=sentence):
        SentenceSettings.read(tmp_path, "MEAN", config, num_labels)


@pytest.mark.parametrize(("break_it", "sentence"), BROKEN.values(), ids=BROKEN)
def test_what_cannot_be_followed_is_refused(break_it: Callable[[Path], object], sentence: str, tmp_path: Path) -> None:
    break_it(tmp_path)
    with pytest.raises(StartError, match=sentence):
        SentenceSettings.read(tmp_path, "MEAN")
