"""Chat templates with tools, each in the manner of a family of models, and chats of agents."""

from typing import Any

HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'Functions:\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls %}
            {%- set call = call.function if call.function else call %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}{{- '<think>\\n' }}{% endif %}
{%- endif %}
"""
LLAMA = """
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{{- '<|im_start|>system\\n' + 'Today: ' + date_string + '\\n' + system }}
{%- for tool in tools or [] %}{{- tool | tojson(indent=4) }}{% endfor %}{{- '<|im_end|>' }}
{%- for message in messages if message.role != 'system' %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>ipython\\n' + message.content | tojson(ensure_ascii=true) + '<|im_end|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
        {{- '<|im_end|>' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
MISTRAL = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.last %}{{- '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{% endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[CALLS][' }}
        {%- for call in message.tool_calls %}
            {{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
            {{- ', ' if not loop.last }}
        {%- endfor %}{{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT]{"content": ' + message.content | string ~ ', "id": "' + message.tool_call_id + '"}[/RESULT]' }}
    {%- else %}{{- ' ' + message.content | trim + eos_token }}{%- endif %}
{%- endfor %}
"""
XML = """
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<function=' ~ call.function.name ~ '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' ~ name ~ '>' ~ (value if value is string else value | tojson) ~ '</parameter>\\n' }}
        {%- endfor %}{{- '</function>' }}
    {%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{- tools | map(attribute='function.name') | join(', ') }}{% endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
TEMPLATES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "xml": XML}
RAW = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```' ~ call.function.arguments }}
        {{- call.function.arguments }}
    {%- endfor %}{{- '<|im_end|>' }}
{%- endfor %}
"""
"""A template that appends arguments as text, as DeepSeek's do."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says the weather <now>.\nDon't ask twice: é 🌍",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]


def call(name: str, arguments: Any, number: int = 1) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def loop_of_tools(arguments: Any, said: str = "") -> list[dict[str, Any]]:
    """Two turns, each with a call, a result and an answer."""
    return [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": f"Weather in Paris? {said}"},
        {"role": "assistant", "content": "", "tool_calls": [call("weather", arguments)]},
        {"role": "tool", "content": f'{{"sky": "blue{said}"}}', "tool_call_id": "call_1", "name": "weather"},
        {"role": "assistant", "content": f" Blue. {said}", "reasoning_content": f"\nlooked it up{said}\n"},
        {"role": "user", "content": "And Rome?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call("weather", arguments, 2)]},
        {"role": "tool", "content": "grey", "tool_call_id": "call_2"},
        {"role": "tool", "content": "12:00", "tool_call_id": "call_2"},
    ]
