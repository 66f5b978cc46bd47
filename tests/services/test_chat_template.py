"""A chat template says what it says in transformers, and reaches nothing beyond its messages."""

from typing import Any

import pytest
from jinja2 import TemplateError as JinjaError
from transformers.utils.chat_template_utils import render_jinja_template

from scheduler_service.frontend.rendering.chat_template import ChatTemplate
from scheduler_service.frontend.rendering.encoding_errors import TemplateError

MAX = 10_000
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "héllo <b>\n & 'you' {{ x }}"}],
    [
        {"role": "system", "content": " brief "},
        {"role": "user", "content": "a\tb"},
        {"role": "assistant", "content": ""},
    ],
]
TEMPLATES = {
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}{{ image_token }}",
    "tokens that the model has none of": "{{ unk_token }}{% if pad_token is defined %}x{% endif %}",
    "white space": "{% for m in messages %}\n   {% if loop.first %}\n a\n  {% endif %}\n{% endfor %}\n b\n",
    "JSON": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}"
    "{{ {'b': 1, 'a': 'é'} | tojson(sort_keys=true) }}{{ [1, 2] | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "no tools and no documents": "{{ tools is none }}{{ documents is none }}"
    "{% if tools is defined and tools %}x{% endif %}",
    "the beginning of an answer": "{% if add_generation_prompt %}assistant{% endif %}",
    "marks for training": "{% for m in messages %}{% generation %}{% set a = 1 %}{{ m.content }}"
    "{% endgeneration %}{{ a }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% continue %}{% endfor %}",
    "a namespace": "{% set n = namespace(seen=false, self=2) %}"
    "{% for m in messages %}{% set n.seen = m.role %}{% endfor %}{{ n.seen }}{{ n.self }}",
    "a dict": "{{ dict(a=1, b=[2]) | tojson }}{{ dict.fromkeys(['x', 'y']) | tojson }}",
    "the year": "{{ strftime_now('%Y') }}",
    "methods of text": "{{ messages[0].content.split()[-1].strip() }}"
    "{{ messages[0]['content'][:3] | upper }}{{ 'a' ~ 1 }}",
    "macros": "{% macro turn(m) %}<{{ m.role }}>{{ caller() }}{% endmacro %}"
    "{% for m in messages %}{% call turn(m) %}x{% endcall %}{% endfor %}",
}
REFUSED = {
    "the author's own refusal": "{{ raise_exception('no system message, please') }}",
    "a template that is none": "{% if %}",
    "arithmetic": "{{ 1 // (messages | length - messages | length) }}",
    "Python's insides": "{{ messages.__class__.__mro__ }}{{ ''.__class__ }}",
    "Python's insides by a filter": "{{ (messages | attr('__class__')).__name__ }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a private attribute": "{{ namespace(_x=1) }}",
    "a private attribute that is set": "{% set n = namespace() %}{% set n.__init__ = 1 %}",
    "a class": "{{ dict.__subclasses__() }}",
    "a long loop": "{% for i in range(10 ** 9) %}{% endfor %}",
}


def variables(chat: list[dict[str, str]]) -> dict[str, Any]:
    return {"messages": chat, "tools": None, "documents": None, "add_generation_prompt": True}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str) -> None:
    for chat in CHATS:
        (expected,), _ = render_jinja_template(
            [chat], chat_template=TEMPLATES[name], add_generation_prompt=True, **TOKENS
        )
        assert ChatTemplate(TEMPLATES[name], TOKENS).render(variables(chat), MAX) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_refuses_is_refused(name: str) -> None:
    template = ChatTemplate(REFUSED[name], TOKENS)
    for chat in CHATS:
        with pytest.raises((JinjaError, ArithmeticError, OverflowError)) as refusal:
            render_jinja_template([chat], chat_template=REFUSED[name], add_generation_prompt=True)
        with pytest.raises(TemplateError, match="the model's chat template refuses these messages: ") as error:
            template.render(variables(chat), MAX)
        if "own" in name:
            assert str(error.value).endswith(str(refusal.value))


def test_the_variables_of_a_template_are_those_that_it_does_not_set_itself() -> None:
    source = (
        "{% for m in messages %}{% set role = m.role %}{{ role }}{% endfor %}{{ role }}"
        "{% if a is not defined %}{% set a = 1 %}{% endif %}{% set b = b if b is defined else 2 %}"
        "{% set c = c | default(3) %}{{ d }}{% macro f(e, d) %}{{ e ~ g ~ d }}{% endmacro %}{{ f(a) }}"
        "{% set h = 4 %}{{ h }}"
        "{% if d %}{% set k = 1 %}{% endif %}{{ k }}{{ raise_exception }}{{ range }}"
    )
    assert ChatTemplate(source, TOKENS).names == {"messages", "a", "b", "c", "d", "g"}
